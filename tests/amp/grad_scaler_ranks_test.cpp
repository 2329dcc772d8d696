// A scaler whose ranks have different gradients: either all ranks step, or
// none.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/comm/init.h"
#include "tests/amp/sharded_sgd.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr float kOverflow = std::numeric_limits<float>::infinity();
constexpr int64_t kElements = 12;

struct Sharded {
  explicit Sharded(const ProcessGroupPtr& group)
      : optimizer({weight}, 1.0, group) {}

  void backward() {
    optimizer.zero_grad();
    scaler.scale((weight * 0.25).sum()).backward();
  }

  torch::Tensor weight = torch::ones({kElements}).requires_grad_();
  testing::ShardedSgd optimizer;
  GradScaler scaler{{.device = at::kCPU, .init_scale = 8}};
};

WORLD_TEST(GradScalerRanks, OneRanksInfinitySkipsAllShards, 1, 2, 3) {
  auto group = init_process_group("gloo");
  Sharded model(group.get());
  model.backward();
  int last = world.size - 1;
  if (world.rank == last) {
    model.optimizer.part(model.weight.grad()).fill_(-kOverflow);
  }
  model.scaler.step(model.optimizer);
  EXPECT_TRUE(model.scaler.found_inf(model.optimizer));
  model.scaler.update();
  EXPECT_EQ(model.optimizer.steps, 0);
  EXPECT_EQ(model.scaler.get_scale(), 4);

  model.backward();
  model.scaler.step(model.optimizer);
  EXPECT_FALSE(model.scaler.found_inf(model.optimizer));
  model.scaler.update();
  EXPECT_EQ(model.optimizer.steps, 1);
  EXPECT_EQ(model.scaler.get_scale(), 4);
  auto part = model.optimizer.part(model.weight.detach());
  EXPECT_TRUE(torch::equal(part, torch::full_like(part, 0.75)));
}

// Gradients are final only in the part that the rank owns: the rest neither
// counts nor changes.
WORLD_TEST(GradScalerRanks, OtherRanksPartsAreLeftAlone, 2, 3) {
  auto group = init_process_group("gloo");
  Sharded model(group.get());
  model.backward();
  auto own = model.optimizer.part(model.weight.grad()).clone();
  model.weight.grad().fill_(kOverflow);
  model.optimizer.part(model.weight.grad()).copy_(own);
  model.scaler.unscale_(model.optimizer);
  EXPECT_FALSE(model.scaler.found_inf(model.optimizer));
  EXPECT_EQ(model.weight.grad().isinf().sum().item<int64_t>(),
            kElements - own.numel());
  EXPECT_EQ(model.optimizer.part(model.weight.grad())[0].item<float>(), 0.25f);
}

WORLD_TEST(GradScalerRanks, ClipsTheNormOfAllShards, 2, 3) {
  auto group = init_process_group("gloo");
  Sharded model(group.get());
  model.backward();
  model.scaler.unscale_(model.optimizer);
  auto norm = clip_grad_norm_(model.optimizer, 0.5);
  EXPECT_NEAR(norm.item<double>(), 0.25 * std::sqrt(kElements), 1e-7);
  model.scaler.step(model.optimizer);
  EXPECT_NEAR(model.optimizer.part(model.weight.detach())[0].item<double>(),
              1 - 0.5 / std::sqrt(kElements), 1e-6);
}

WORLD_TEST(GradScalerRanks, ARankMayHaveNoGradient, 2, 3) {
  auto group = init_process_group("gloo");
  auto weight = torch::ones({1}).requires_grad_();  // the last rank owns it
  auto other = torch::ones({1}).requires_grad_();   // has no gradient
  testing::ShardedSgd optimizer({other, weight}, 1.0, group.get());
  GradScaler scaler({.device = at::kCPU, .init_scale = 8});
  scaler.scale(weight.sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(optimizer.steps, 1);

  optimizer.zero_grad();
  EXPECT_THAT([&] { scaler.step(optimizer); },
              ThrowsMessage<std::logic_error>(HasSubstr("has a gradient")));
}

WORLD_TEST(GradScalerRanks, OneRanksFloat16IsRefusedByAll, 2) {
  auto group = init_process_group("gloo");
  auto dtype = world.rank == 1 ? torch::kHalf : torch::kFloat;
  auto weight = torch::ones({4}, dtype).requires_grad_();
  testing::ShardedSgd optimizer({weight}, 1.0, group.get());
  GradScaler scaler({.device = at::kCPU, .init_scale = 8});
  scaler.scale(weight.sum()).backward();
  EXPECT_THAT([&] { scaler.step(optimizer); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("float16")));
  EXPECT_EQ(optimizer.steps, 0);
}

// Null meant no group, so scales of ranks with different gradients drifted.
WORLD_TEST(GradScalerRanks, PlainOptimizersAgreeInTheDefaultGroup, 2, 3) {
  auto group = init_process_group("gloo");
  const auto alone = split_group({{world.rank}});
  for (bool agree : {false, true}) {
    auto weight = torch::ones({2}).requires_grad_();
    torch::optim::SGD optimizer({weight}, 1.0);
    GradScaler scaler({.device = at::kCPU,
                       .init_scale = 8,
                       .process_group = agree ? nullptr : alone});
    scaler.scale(weight.sum()).backward();
    if (world.rank == 0) weight.grad()[0] = NAN;
    scaler.step(optimizer);
    scaler.update();
    bool skipped = agree || world.rank == 0;
    EXPECT_EQ(weight[1].item<float>(), skipped ? 1 : 0);
    EXPECT_EQ(scaler.get_scale(), skipped ? 4 : 8);
  }
}

}  // namespace
}  // namespace lockstep::internal
