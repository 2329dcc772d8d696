// Compares vocab_parallel_cross_entropy() with torch::cross_entropy_loss of the
// whole logits.

#include "lockstep/parallel/tensor/vocab_parallel_cross_entropy.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/tensor/whole_tensors.h"

namespace lockstep::internal {
namespace {

using nn::vocab_parallel_cross_entropy;
using nn::VocabParallelCrossEntropyOptions;
using testing::expect_close;
using testing::World;

struct LossCase {
  int64_t classes = 13;
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  double smoothing = 0;
  bool ignored = false;
  double scale = 1;
  at::ScalarType dtype = at::kDouble;
  double bound = 1e-13;

  VocabParallelCrossEntropyOptions options() const {
    VocabParallelCrossEntropyOptions given{.label_smoothing = smoothing};
    if (reduction == at::Reduction::Sum) given.reduction = torch::kSum;
    if (reduction == at::Reduction::None) given.reduction = torch::kNone;
    if (ignored) given.ignore_index = 1;
    return given;
  }
};

// [2, 4]; each class occurs if there are few.
at::Tensor targets(int64_t classes) {
  return torch::arange(8).mul(5).remainder(classes).view({2, 4});
}

at::Tensor own_logits(const World& world, const at::Tensor& whole) {
  const auto parts = whole.detach().chunk(world.size, -1);
  const auto rank = static_cast<size_t>(world.rank);
  auto part = rank < parts.size() ? parts[rank] : whole.narrow(-1, 0, 0);
  return part.detach().clone().requires_grad_();
}

void expect_same_loss(const World& world, const LossCase& test) {
  torch::manual_seed(3);
  auto whole = torch::randn({2, 4, test.classes}, at::kDouble)
                   .mul(test.scale)
                   .to(test.dtype)
                   .requires_grad_();
  auto target = targets(test.classes);
  const auto options = test.options();
  // 16-bit logits are computed in float32.
  auto computed = test.dtype == at::kBFloat16 ? whole.to(at::kFloat) : whole;
  auto want = at::cross_entropy_loss(computed.flatten(0, 1), target.flatten(),
                                     {}, test.reduction, options.ignore_index,
                                     test.smoothing);
  auto factor = torch::rand(want.sizes(), want.options());
  (want * factor).sum().backward();

  auto part = own_logits(world, whole);
  auto have = vocab_parallel_cross_entropy(part, target, options);
  EXPECT_EQ(have.scalar_type(), want.scalar_type());
  expect_close(have.flatten(), want.flatten(), test.bound, "loss");
  (have.flatten() * factor.flatten()).sum().backward();
  EXPECT_EQ(part.grad().scalar_type(), test.dtype);
  expect_close(part.grad(), own_logits(world, whole.grad()), test.bound,
               "gradient");
}

WORLD_TEST(VocabParallelCrossEntropy, IsThatOfTheWholeLogits, 1, 2, 3, 4) {
  testing::on_both_backends([&] {
    // All ranks have equally many of 12; some have none of 2.
    for (int64_t classes : {12, 13, 2}) {
      for (auto reduction :
           {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
        for (double smoothing : {0.0, 0.1}) {
          for (bool ignored : {false, true}) {
            SCOPED_TRACE(c10::str("classes ", classes, ", reduction ",
                                  static_cast<int>(reduction), ", smoothing ",
                                  smoothing, ", ignored ", ignored));
            expect_same_loss(world, {.classes = classes,
                                     .reduction = reduction,
                                     .smoothing = smoothing,
                                     .ignored = ignored});
          }
        }
      }
    }
  });
}

WORLD_TEST(VocabParallelCrossEntropy, LargeLogitsAndOtherTypes, 1, 2, 3) {
  auto group = init_process_group();
  expect_same_loss(world, {.scale = 1e4});
  expect_same_loss(world, {.dtype = at::kFloat, .bound = 1e-6});
  // The gradient has 8 bits.
  expect_same_loss(world, {.dtype = at::kBFloat16, .bound = 4e-3});
}

WORLD_TEST(VocabParallelCrossEntropy, WithoutValidTargetsTheGradientIsZero, 2) {
  auto group = init_process_group();
  auto part = torch::ones({2, 3}).requires_grad_();
  auto loss =
      vocab_parallel_cross_entropy(part, torch::full({2}, -100, torch::kLong));
  EXPECT_TRUE(std::isnan(loss.item<double>()));
  loss.backward();
  EXPECT_TRUE(torch::equal(part.grad(), torch::zeros({2, 3})));
}

WORLD_TEST(VocabParallelCrossEntropy, MistakesAreNamedOnAllRanks, 2, 3) {
  auto group = init_process_group();
  auto logits = torch::zeros({2, 3});
  auto message = testing::message_of([&] {
    vocab_parallel_cross_entropy(logits, torch::tensor({0, 3 * world.size}));
  });
  EXPECT_EQ(message, c10::str("vocab_parallel_cross_entropy: target has the "
                              "class ",
                              3 * world.size, "; allowed are 0 to ",
                              3 * world.size - 1, " and ignore_index"));
  message = testing::message_of([&] {
    vocab_parallel_cross_entropy(logits, torch::zeros({3}, torch::kLong));
  });
  EXPECT_EQ(message,
            "vocab_parallel_cross_entropy: logits have the shape [2, 3], "
            "target [3]; target must have the shape of logits without the last "
            "dimension, that of the classes");
  message = testing::message_of(
      [&] { vocab_parallel_cross_entropy(logits, torch::zeros({2})); });
  EXPECT_EQ(message,
            "vocab_parallel_cross_entropy: logits are Float and target Float; "
            "give floating-point logits and target as Long");
  // The last rank has the most classes.
  auto wrong = torch::zeros({2, world.rank == world.size - 1 ? 4 : 3});
  message = testing::message_of([&] {
    vocab_parallel_cross_entropy(wrong, torch::zeros({2}, torch::kLong));
  });
  EXPECT_NE(message.find("are not those that torch.chunk() gives"),
            std::string::npos)
      << message;
  auto again = torch::zeros({2, 3}).requires_grad_();
  message = testing::message_of([&] {
    auto loss =
        vocab_parallel_cross_entropy(again, torch::zeros({2}, torch::kLong));
    loss.backward({}, /*retain_graph=*/{}, /*create_graph=*/true);
  });
  EXPECT_NE(message.find("has no second derivative"), std::string::npos)
      << message;
}

}  // namespace
}  // namespace lockstep::internal
