// Metrics over ranks: what one process with all samples computes.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/metrics/metrics.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kSamples = 57;
constexpr int64_t kClasses = 7;

struct Samples {
  at::Tensor values, weights, scores, target;
};

// The same on all ranks.
Samples all_samples() {
  torch::manual_seed(11);
  Samples all{torch::randn({kSamples}), torch::rand({kSamples}),
              torch::randn({kSamples, kClasses}),
              torch::randint(kClasses, {kSamples})};
  all.target.masked_fill_(torch::rand({kSamples}) < 0.2, -100);
  return all;
}

// Returns the parts of the samples that a rank updates with: the last rank has
// none, the others have parts of different sizes, one of them empty.
std::vector<Samples> parts_of(const Samples& all, int rank, int size) {
  const int ranks = std::max(1, size - 1);
  std::vector<Samples> parts;
  if (rank >= ranks) return parts;
  const int64_t begin = rank == 0 ? 0 : 20;
  const int64_t end = rank + 1 == ranks ? kSamples : 20;
  for (int64_t at = begin; at <= end;) {
    const int64_t next = std::min(at + 1 + at / 3, end);
    parts.push_back(
        {all.values.slice(0, at, next), all.weights.slice(0, at, next),
         all.scores.slice(0, at, next), all.target.slice(0, at, next)});
    if (next == at) break;  // an empty part
    at = next;
  }
  return parts;
}

at::Tensor counted(const at::Tensor& all, const at::Tensor& target) {
  return all.index({target != -100});
}

WORLD_TEST(Metrics, UnevenRanksGiveWhatOneProcessGives, 1, 2, 3) {
  const Samples all = all_samples();
  const at::Tensor scores = counted(all.scores, all.target);
  const at::Tensor target = counted(all.target, all.target);
  for (const char* backend : {"", "gloo"}) {
    const auto group = init_process_group(backend);
    metrics::Mean mean, weighted, each;
    metrics::Sum sum;
    metrics::Accuracy top1, top3({.top_k = 3}), labels;
    metrics::ConfusionMatrix matrix({.num_classes = kClasses}),
        label_matrix({.num_classes = kClasses});
    metrics::Perplexity perplexity, from_loss;
    for (const Samples& part : parts_of(all, world.rank, world.size)) {
      const auto size = part.values.size(0);
      mean.update(part.values);
      weighted.update(part.values, part.weights);
      // The mean of a batch, with its size as the weight.
      each.update(part.values.mean(), static_cast<double>(size));
      sum.update(part.values);
      top1.update(part.scores, part.target);
      top3.update(part.scores, part.target);
      labels.update(part.scores.argmax(-1), part.target);
      matrix.update(part.scores, part.target);
      label_matrix.update(part.scores.argmax(-1).to(at::kInt), part.target);
      perplexity.update(part.scores, part.target);
      from_loss.update(torch::cross_entropy_loss(part.scores, part.target),
                       (part.target != -100).sum().item<int64_t>());
    }
    for (int repeated = 0; repeated < 2; ++repeated) {
      const at::Tensor values = all.values.to(at::kDouble);
      const at::Tensor weights = all.weights.to(at::kDouble);
      EXPECT_NEAR(mean.compute(), values.mean().item<double>(), 1e-12);
      EXPECT_NEAR(weighted.compute(),
                  ((values * weights).sum() / weights.sum()).item<double>(),
                  1e-12);
      EXPECT_NEAR(each.compute(), values.mean().item<double>(), 1e-6);
      EXPECT_NEAR(sum.compute(), values.sum().item<double>(), 1e-12);
      const double right =
          (scores.argmax(-1) == target).to(at::kDouble).mean().item<double>();
      EXPECT_EQ(top1.compute(), right);
      EXPECT_EQ(labels.compute(), right);
      // Less than three classes have a higher score.
      const at::Tensor higher =
          (scores > scores.gather(1, target.unsqueeze(1))).sum(1);
      EXPECT_EQ(top3.compute(),
                (higher < 3).to(at::kDouble).mean().item<double>());
      const at::Tensor counts = matrix.compute();
      EXPECT_EQ(counts.scalar_type(), at::kLong);
      EXPECT_TRUE(counts.equal(label_matrix.compute()));
      for (int64_t row = 0; row < kClasses; ++row) {
        for (int64_t column = 0; column < kClasses; ++column) {
          EXPECT_EQ(counts[row][column].item<int64_t>(),
                    ((target == row) & (scores.argmax(-1) == column))
                        .sum()
                        .item<int64_t>());
        }
      }
      const double expected =
          std::exp(torch::cross_entropy_loss(scores.to(at::kDouble), target)
                       .item<double>());
      EXPECT_NEAR(perplexity.compute(), expected, 1e-5);
      EXPECT_NEAR(from_loss.compute(), expected, 1e-5);
    }
  }
}

WORLD_TEST(Metrics, NoSamplesAnywhereAreNoNumber, 1, 2, 3) {
  const auto group = init_process_group();
  metrics::Mean mean;
  metrics::Accuracy accuracy;
  metrics::Perplexity perplexity;
  metrics::ConfusionMatrix matrix({.num_classes = 2});
  // Samples that do not count are none.
  const at::Tensor ignored = torch::full({3}, -100, at::kLong);
  mean.update(std::nan(""), 0);
  mean.update(torch::full({2}, std::nan("")), torch::zeros({2}));
  mean.update(torch::empty({0}));
  accuracy.update(torch::rand({3, 2}), ignored);
  perplexity.update(torch::rand({3, 2}), ignored);
  perplexity.update(torch::tensor(std::nan("")), 0);
  matrix.update(torch::rand({3, 2}), ignored);
  EXPECT_TRUE(std::isnan(mean.compute()));
  EXPECT_EQ(metrics::Sum().compute(), 0);
  EXPECT_TRUE(std::isnan(accuracy.compute()));
  EXPECT_TRUE(std::isnan(perplexity.compute()));
  EXPECT_TRUE(matrix.compute().equal(torch::zeros({2, 2}, at::kLong)));
}

WORLD_TEST(Metrics, ComputeIsOneCollectiveAndUpdateNone, 2) {
  const auto group = init_process_group();
  metrics::ConfusionMatrix matrix({.num_classes = 3});
  const auto before = inside(group).next_sequence_number();
  matrix.update(torch::rand({4, 3}), torch::zeros({4}, at::kLong));
  EXPECT_EQ(inside(group).next_sequence_number(), before + 1);
  matrix.compute();
  EXPECT_EQ(inside(group).next_sequence_number(), before + 3);
}

// A batch without samples has NaN as its mean.
WORLD_TEST(Metrics, AWeightOfZeroLeavesOutWhatIsNoNumber, 1) {
  metrics::Mean mean;
  mean.update(2);
  mean.update(std::nan(""), 0);
  mean.update(torch::full({2}, std::nan("")), 0);
  mean.update(torch::tensor({std::nan(""), 4.0}), torch::tensor({0.0, 1.0}));
  EXPECT_EQ(mean.compute(), 3);
  metrics::Perplexity perplexity;
  perplexity.update(torch::ones({}), 5);
  perplexity.update(torch::tensor(std::nan("")), 0);
  EXPECT_DOUBLE_EQ(perplexity.compute(), std::exp(1));
}

WORLD_TEST(Metrics, WithoutAGroupThisProcessCountsAlone, 2) {
  metrics::Sum sum;
  sum.update(world.rank + 1);
  EXPECT_EQ(sum.compute(), world.rank + 1);
}

WORLD_TEST(Metrics, OnlyTheRanksOfTheGroupCount, 3) {
  const auto group = init_process_group();
  const auto pair = new_group({0, 2});
  if (!pair) return;
  metrics::Mean mean({.group = pair});
  mean.update(world.rank);
  EXPECT_EQ(mean.compute(), 1);
}

WORLD_TEST(Metrics, ResetForgetsAndStatesComeBack, 1, 2) {
  const auto group = init_process_group();
  metrics::Mean mean, other;
  mean.update(3, 2);
  const at::Tensor state = mean.state_dict();
  mean.reset();
  mean.update(10);
  EXPECT_EQ(mean.compute(), 10);
  other.update(1);
  other.load_state_dict(state);
  state.zero_();
  EXPECT_EQ(other.compute(), 3);
  other.update(6, 1);
  EXPECT_EQ(other.compute(), 4);
  EXPECT_THAT([&] { other.load_state_dict(torch::zeros({2})); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("float64 [2]")));
  EXPECT_THAT([&] { other.load_state_dict(torch::zeros({3}, at::kDouble)); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("[3]")));
  EXPECT_EQ(other.compute(), 4);
}

WORLD_TEST(Metrics, ValuesAreNeitherKeptNorDifferentiated, 1) {
  const at::Tensor value = torch::ones({2}).requires_grad_();
  metrics::Mean mean;
  {
    const c10::InferenceMode inference;
    mean.update(torch::ones({2}) * 3);
  }
  mean.update(value * 5);
  EXPECT_FALSE(mean.state_dict().requires_grad());
  {
    const c10::InferenceMode inference;
    mean.update(torch::ones({2}) * 4);
  }
  EXPECT_EQ(mean.compute(), 4);
}

// float32 would stay at 2^24.
WORLD_TEST(Metrics, CountsAreExactBeyondFloats, 1) {
  metrics::Sum sum;
  sum.update(std::pow(2.0, 24));
  for (int i = 0; i < 3; ++i) sum.update(torch::ones({1}));
  EXPECT_EQ(sum.compute(), std::pow(2.0, 24) + 3);
  metrics::Sum halves;
  halves.update(torch::full({100'000}, 1, at::kBFloat16));
  EXPECT_EQ(halves.compute(), 100'000);
}

WORLD_TEST(Metrics, SequencesOfTokensAreSamples, 1) {
  const at::Tensor scores = torch::randn({2, 5, 4}, at::kBFloat16);
  const at::Tensor target = torch::randint(4, {2, 5}, at::kInt);
  metrics::Accuracy accuracy, flat_accuracy;
  metrics::Perplexity perplexity;
  accuracy.update(scores, target);
  flat_accuracy.update(scores.view({10, 4}), target.view({10}));
  perplexity.update(scores, target);
  EXPECT_EQ(accuracy.compute(), flat_accuracy.compute());
  const double loss =
      torch::cross_entropy_loss(scores.to(at::kFloat).view({10, 4}),
                                target.view({10}).to(at::kLong))
          .item<double>();
  EXPECT_NEAR(perplexity.compute(), std::exp(loss), 1e-5);
}

template <class Action>
void expect_refused(const Action& action, const char* why) {
  EXPECT_THAT(action, ThrowsMessage<std::invalid_argument>(HasSubstr(why)));
}

WORLD_TEST(Metrics, ArgumentsThatDoNotFitAreRefused, 1) {
  metrics::Accuracy accuracy, top3({.top_k = 3});
  metrics::ConfusionMatrix matrix({.num_classes = 3});
  metrics::Perplexity perplexity;
  metrics::Mean mean;
  const at::Tensor scores = torch::rand({4, 3});
  const at::Tensor labels = torch::zeros({4}, at::kLong);
  metrics::Sum sum;
  const at::Tensor complex = torch::ones({2}, at::kComplexFloat);
  expect_refused([&] { sum.update(complex); }, "give real ones");
  expect_refused([&] { mean.update(complex); }, "give real ones");
  expect_refused([&] { mean.update(torch::ones({2}), complex); },
                 "give real ones");
  expect_refused([&] { accuracy.update(labels, labels.to(at::kUInt16)); },
                 "of signed integers");
  expect_refused([&] { accuracy.update(scores, labels.to(at::kUInt32)); },
                 "of signed integers");
  expect_refused([&] { accuracy.update(scores, labels.narrow(0, 0, 3)); },
                 "Accuracy: got Float [4, 3] on cpu and targets Long [3]");
  expect_refused([&] { accuracy.update(scores, labels.to(at::kFloat)); },
                 "targets [...] of signed integers");
  expect_refused([&] { accuracy.update(labels, labels.view({2, 2})); },
                 "give scores");
  expect_refused([&] { accuracy.update(labels.narrow(0, 0, 2), labels); },
                 "of one shape");
  expect_refused([&] { top3.update(labels, labels); }, "give scores");
  expect_refused([&] { top3.update(scores.narrow(1, 0, 2), labels); },
                 "the scores have 2 classes, at least 3");
  expect_refused([&] { matrix.update(scores.narrow(1, 0, 2), labels); },
                 "the scores have 2 classes, num_classes is 3");
  expect_refused([&] { perplexity.update(scores, labels.view({2, 2})); },
                 "Perplexity: got");
  expect_refused([&] { perplexity.update(scores, 3); }, "has 12 elements");
  expect_refused([&] { perplexity.update(torch::ones({}), -1); }, "-1 tokens");
  expect_refused([&] { mean.update(torch::ones({3}), torch::ones({2})); },
                 "a weight for each value");
  expect_refused([&] { metrics::Accuracy({.top_k = 0}); }, "top_k is 0");
  expect_refused([&] { metrics::ConfusionMatrix({.num_classes = 0}); },
                 "num_classes is 0");
  // Nothing was counted.
  EXPECT_TRUE(std::isnan(accuracy.compute()));
  EXPECT_TRUE(std::isnan(mean.compute()));
}

// One rank alone has the mistake; all ranks hear of it and go on.
// In uint8, 156 is -100 and 1000 is 232: samples were left out, and refused as
// no class.
WORLD_TEST(Metrics, TargetsOfAnyIntegerAreEqual, 1) {
  const at::Tensor labels = torch::tensor({156, 240, 3});
  const at::Tensor scores = torch::rand({3, 1000}, torch::kDouble);
  metrics::Accuracy accuracy, of_labels;
  metrics::Perplexity expected_perplexity, perplexity;
  accuracy.update(torch::one_hot(labels, 1000).to(torch::kFloat),
                  labels.to(torch::kByte));
  of_labels.update(torch::tensor({156, 240, 0}), labels.to(torch::kByte));
  EXPECT_EQ(accuracy.compute(), 1);
  EXPECT_DOUBLE_EQ(of_labels.compute(), 2.0 / 3);
  expected_perplexity.update(scores, labels);
  perplexity.update(scores, labels.to(torch::kByte));
  EXPECT_DOUBLE_EQ(perplexity.compute(), expected_perplexity.compute());
  perplexity.reset();
  perplexity.update(scores, (labels % 100).to(torch::kChar));
  EXPECT_GT(perplexity.compute(), 0);
}

WORLD_TEST(Metrics, LabelsThatAreNoClassAreAnErrorOnEveryRank, 1, 2, 3) {
  const auto group = init_process_group();
  const at::Tensor scores = torch::rand({4, 3});
  const at::Tensor good = torch::tensor({0, 1, 2, -100});
  const at::Tensor bad = torch::tensor({0, 3, -1, -100});
  const at::Tensor& target = world.rank == 0 ? bad : good;
  metrics::Accuracy accuracy;
  metrics::ConfusionMatrix matrix({.num_classes = 3}),
      labels({.num_classes = 3});
  metrics::Perplexity perplexity;
  accuracy.update(scores, target);
  matrix.update(scores, target);
  perplexity.update(scores, target);
  labels.update(world.rank == 0 ? torch::tensor({0, 3, 0, 9}) : good.abs() % 3,
                good);
  expect_refused([&] { accuracy.compute(); }, "Accuracy: 2 labels");
  expect_refused([&] { matrix.compute(); }, "ConfusionMatrix: 2 labels");
  expect_refused([&] { perplexity.compute(); }, "Perplexity: 2 labels");
  expect_refused([&] { labels.compute(); }, "ConfusionMatrix: 1 labels");
  accuracy.reset();
  accuracy.update(scores, scores.argmax(-1));
  EXPECT_EQ(accuracy.compute(), 1);
}

WORLD_TEST(Metrics, RanksWithDifferentMetricsAreToldOnEveryRank, 2, 3) {
  const auto group = init_process_group();
  metrics::Accuracy top1, top2({.top_k = 2});
  metrics::Perplexity perplexity;
  const bool other = world.rank == 1;
  expect_refused([&] { (other ? top1 : top2).compute(); },
                 other ? "on this rank Accuracy(top_k=1)"
                       : "on this rank Accuracy(top_k=2)");
  expect_refused(
      [&] { static_cast<void>(other ? top1.compute() : perplexity.compute()); },
      "different metrics");
  EXPECT_TRUE(std::isnan(top2.compute()));
}

}  // namespace
}  // namespace lockstep::internal
