// Clipping and loss scaling over gradients of which each rank owns a part.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>

#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/zero_training.h"

namespace lockstep::internal {
namespace {

using namespace lockstep::internal::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Model = DistributedDataParallel<ZeroNet>;
using Zero = ZeroRedundancyOptimizer<optim::AdamW>;

constexpr optim::AdamWOptions kOptions{.lr = 0.01};

struct Trained {
  at::Tensor parameters;
  std::vector<double> norms{};
};

template <class Optimizer>
Trained clipped(Model& model, Optimizer& optimizer, int rank) {
  Trained result;
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    zero_loss(model(zero_batch(step, rank, torch::kFloat))).backward();
    const at::Tensor norm = clip_grad_norm_(optimizer, 0.02);
    result.norms.push_back(norm.item<double>());
    optimizer.step();
  }
  result.parameters = flat_parameters(*model.module());
  return result;
}

WORLD_TEST(ZeroAmp, ClippingIsByTheNormOfAllParts, 1, 2, 3) {
  auto group = init_process_group();
  Model plain_model{ZeroNet()};
  optim::AdamW plain(plain_model->parameters(), kOptions);
  const auto expected = clipped(plain_model, plain, world.rank);
  for (bool shared : {false, true}) {
    Model model{ZeroNet()};
    Zero zero(model, kOptions, {.shared_parameters = shared});
    const auto result = clipped(model, zero, world.rank);
    zero.synchronize();
    for (size_t i = 0; i < expected.norms.size(); ++i) {
      EXPECT_GT(expected.norms[i], 0.02);  // it was clipped
      EXPECT_NEAR(result.norms[i], expected.norms[i], 1e-4 * expected.norms[i]);
    }
    EXPECT_LT((flat_parameters(*model.module()) - expected.parameters)
                  .abs()
                  .max()
                  .item<double>(),
              1e-3);
  }
}

template <class Optimizer>
at::Tensor scaled(Model& model, Optimizer& optimizer, const World& world,
                  double& scale) {
  GradScaler scaler(
      {.device = torch::kCPU, .init_scale = 1024.0, .growth_interval = 3});
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    auto loss = zero_loss(model(zero_batch(step, world.rank, torch::kFloat)));
    // One rank overflows in one step; only one rank owns the part with the
    // infinity.
    if (step == 4 && world.rank == world.size - 1) {
      loss = loss + model.module()->last->bias.sum() *
                        std::numeric_limits<float>::infinity();
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
  }
  scale = scaler.get_scale();
  return flat_parameters(*model.module());
}

WORLD_TEST(ZeroAmp, AnOverflowInOnePartSkipsTheStepOfAll, 1, 2, 3) {
  auto group = init_process_group();
  double plain_scale = 0;
  double scale = 0;
  Model plain_model{ZeroNet()};
  optim::AdamW plain(plain_model->parameters(), kOptions);
  const auto expected = scaled(plain_model, plain, world, plain_scale);
  EXPECT_TRUE(expected.isfinite().all().item<bool>());
  for (bool shared : {false, true}) {
    Model model{ZeroNet()};
    Zero zero(model, kOptions, {.shared_parameters = shared});
    scaled(model, zero, world, scale);
    zero.synchronize();
    EXPECT_TRUE(flat_parameters(*model.module()).equal(expected)) << shared;
    EXPECT_EQ(scale, plain_scale);
  }
}

// A rank that has no more inputs can neither clip its part nor agree on the
// norm. So the first iteration must fail, not one hours later.
WORLD_TEST(ZeroAmp, AJoinWithUnevenInputsRefusesBothAtTheFirstCall, 1, 2) {
  auto group = init_process_group();
  Model model{ZeroNet()};
  Zero zero(model, kOptions);
  GradScaler scaler({.device = torch::kCPU});
  const auto backward = [&] {
    zero.zero_grad();
    scaler.scale(zero_loss(model(zero_batch(0, world.rank, torch::kFloat))))
        .backward();
  };
  const auto refused = ThrowsMessage<std::logic_error>(
      AllOf(HasSubstr("join"), HasSubstr("throw_on_early_termination")));
  const std::vector<Joinable*> both{&model.joinable(), &zero};
  join(both, [&] {
    backward();
    EXPECT_THAT([&] { clip_grad_norm_(zero, 1.0); }, refused);
    EXPECT_THAT([&] { clip_grad_value_(zero, 1.0); }, refused);
    EXPECT_THAT([&] { scaler.unscale_(zero); }, refused);
    zero.step();
  });
  // The inputs are even, so no rank acts as a shadow.
  for (const JoinOptions& even :
       {JoinOptions{.throw_on_early_termination = true},
        JoinOptions{.enable = false}}) {
    join(
        both,
        [&] {
          backward();
          scaler.unscale_(zero);
          clip_grad_norm_(zero, 1.0);
          scaler.step(zero);
          scaler.update();
        },
        even);
  }
}

WORLD_TEST(ZeroAmp, SteppingInBackwardRefusesBoth, 2) {
  auto group = init_process_group();
  Model model{ZeroNet()};
  Zero zero(model, kOptions, {.step_in_backward = true});
  GradScaler scaler({.device = torch::kCPU});
  scaler.scale(zero_loss(model(zero_batch(0, world.rank, torch::kFloat))))
      .backward();
  EXPECT_THROW(clip_grad_norm_(zero, 1.0), std::logic_error);
  EXPECT_THROW(scaler.step(zero), std::logic_error);
}

}  // namespace
}  // namespace lockstep::internal
