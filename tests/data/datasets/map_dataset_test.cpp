// MapDataset, BatchMapDataset, Compose, SampleRandom.

#include "lockstep/data/datasets/map_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/datasets/any_dataset.h"
#include "lockstep/data/datasets/batch_map_dataset.h"
#include "lockstep/data/datasets/concat_dataset.h"
#include "lockstep/data/datasets/repeated_dataset.h"
#include "lockstep/data/datasets/shuffled_dataset.h"
#include "lockstep/data/datasets/subset.h"
#include "lockstep/data/datasets/take_dataset.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/data/transforms/compose.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Sample = torch::data::Example<>;

TensorDataset numbered_rows(int64_t count) {
  return {torch::arange(count), torch::arange(count) + 1000};
}

// Replaces the data by a random number.
struct Draw {
  at::Tensor operator()(const at::Tensor&, SampleRandom& random) const {
    return torch::tensor(random.uniform(), torch::kDouble);
  }
};

template <class D>
double drawn(const D& dataset, size_t index) {
  return dataset.get(index).data.template item<double>();
}

template <class D>
std::vector<double> all_drawn(const D& dataset) {
  std::vector<double> all;
  for (size_t i = 0; i < dataset.size(); ++i) all.push_back(drawn(dataset, i));
  return all;
}

TEST(MapDataset, ChangesTheSampleOrItsData) {
  const auto rows = numbered_rows(4);
  const MapDataset whole(
      rows, [](Sample sample) { return Sample(sample.target, sample.data); });
  EXPECT_EQ(whole.get(2).data.item<int64_t>(), 1002);
  EXPECT_EQ(whole.get(2).target.item<int64_t>(), 2);

  const MapDataset data(rows, [](const at::Tensor& x) { return x * 10; });
  EXPECT_EQ(data.get(2).data.item<int64_t>(), 20);
  EXPECT_EQ(data.get(2).target.item<int64_t>(), 1002);
  EXPECT_EQ(data.size(), 4u);

  const MapDataset other(rows, [](const Sample& sample) {
    return sample.data.item<int64_t>() + 0.5;
  });
  EXPECT_EQ(other.get(3), 3.5);
  EXPECT_EQ(other.get_batch(std::vector<size_t>{1, 0}),
            (std::vector<double>{1.5, 0.5}));
}

TEST(MapDataset, GivesRandomNumbersIfTheTransformTakesThem) {
  const auto rows = numbered_rows(4);
  const MapDataset whole(rows, [](Sample sample, SampleRandom& random) {
    sample.target = torch::tensor(random.uniform());
    return sample;
  });
  const MapDataset data(rows, Draw());
  SampleRandom expected(0, 0, 3);
  const double first = expected.uniform();
  EXPECT_FLOAT_EQ(whole.get(3).target.item<float>(), static_cast<float>(first));
  EXPECT_EQ(drawn(data, 3), first);
}

TEST(MapDataset, KeepsExamplesWithoutTarget) {
  struct Unlabelled
      : torch::data::datasets::Dataset<Unlabelled, torch::data::TensorExample> {
    torch::data::TensorExample get(size_t index) override {
      return torch::full({2}, static_cast<int64_t>(index));
    }
    std::optional<size_t> size() const override { return 3; }
  };
  MapDataset mapped(Unlabelled(), [](const at::Tensor& x) { return x + 1; });
  static_assert(
      std::is_same_v<decltype(mapped.get(0)), torch::data::TensorExample>);
  DistributedSampler sampler(3, {.shuffle = false});
  DataLoader loader(mapped, sampler, {.batch_size = 3});
  EXPECT_TRUE(torch::equal(
      loader.begin()->data,
      torch::tensor({1, 1, 2, 2, 3, 3}, torch::kLong).view({3, 2})));
}

TEST(MapDataset, DrawsDependOnSeedEpochAndSampleOnly) {
  MapDataset mapped(numbered_rows(50), Draw(), {.seed = 1});
  const auto first = all_drawn(mapped);
  EXPECT_EQ(std::set<double>(first.begin(), first.end()).size(), 50u);
  EXPECT_EQ(all_drawn(mapped), first) << "asked again";
  std::vector<double> backward;
  for (size_t i = 50; i-- > 0;) backward.push_back(drawn(mapped, i));
  std::reverse(backward.begin(), backward.end());
  EXPECT_EQ(backward, first) << "in another order";

  mapped.set_epoch(1);
  EXPECT_EQ(mapped.epoch(), 1);
  const auto second = all_drawn(mapped);
  for (size_t i = 0; i < 50; ++i) EXPECT_NE(first[i], second[i]);
  mapped.set_epoch(0);
  EXPECT_EQ(all_drawn(mapped), first) << "the first epoch again";
  EXPECT_NE(all_drawn(MapDataset(numbered_rows(50), Draw(), {.seed = 2})),
            first);
}

// Two transforms that use the same seed must not draw the same numbers: a crop
// on the left would always be flipped.
TEST(MapDataset, OnTopOfAnotherDrawsOtherNumbers) {
  const auto add = [](const at::Tensor& x, SampleRandom& random) {
    return torch::stack(
        {x.view({-1})[-1], torch::tensor(random.uniform(), torch::kDouble)});
  };
  const auto pair = [&](const auto& below) {
    const MapDataset above(below, add);
    const auto numbers = above.get(0).data;
    EXPECT_NE(numbers[0].template item<double>(),
              numbers[1].template item<double>());
  };
  const MapDataset once(numbered_rows(3), Draw());
  pair(once);
  pair(Subset(once, {0}));
  pair(TakeDataset(once, 1));
  pair(RepeatedDataset(once, 2));
  pair(AnyDataset<>(once));
  pair(ConcatDataset(once, once));
  pair(MapDataset(numbered_rows(3), Draw()));
}

TEST(MapDataset, SetEpochReachesEveryDatasetBelow) {
  const MapDataset once(numbered_rows(6), Draw());
  const auto changes = [](auto dataset) {
    const double first = drawn(dataset, 1);
    dataset.set_epoch(1);
    EXPECT_NE(drawn(dataset, 1), first);
    dataset.set_epoch(0);
    EXPECT_EQ(drawn(dataset, 1), first);
  };
  changes(Subset(once, {3, 4}));
  changes(TakeDataset(once, 2));
  changes(ShuffledDataset(once, 0));
  changes(RepeatedDataset(once, 2));
  changes(ConcatDataset(once, once));
  changes(ConcatDataset(once, numbered_rows(3)));
  changes(TakeDataset(ConcatDataset(numbered_rows(3), once), 6, 2));
  changes(AnyDataset<>(once));
  changes(MapDataset(once, [](Sample sample) { return sample; }));
  using Map = std::remove_const_t<decltype(once)>;
  changes(TakeDataset(std::make_shared<Map>(once), 2));
}

TEST(MapDataset, AboveARepeatedDatasetAugmentsEachRepetition) {
  const MapDataset above(RepeatedDataset(numbered_rows(2), 2), Draw());
  EXPECT_NE(drawn(above, 0), drawn(above, 2));
  const RepeatedDataset below(MapDataset(numbered_rows(2), Draw()), 2);
  EXPECT_EQ(drawn(below, 0), drawn(below, 2));
}

TEST(MapDataset, WorkersAndRanksDoNotChangeTheBatches) {
  const auto augment = [](Sample sample, SampleRandom& random) {
    auto noise = torch::randn({2}, random.generator());
    return Sample(sample.data + noise * random.uniform(), sample.target);
  };
  MapDataset mapped(numbered_rows(41), augment, {.seed = 5});
  const auto by_sample = [&](int64_t workers, int64_t replicas) {
    std::map<int64_t, at::Tensor> samples;
    for (int64_t rank = 0; rank < replicas; ++rank) {
      DistributedSampler sampler(41, {.num_replicas = replicas, .rank = rank});
      DataLoader loader(mapped, sampler,
                        {.batch_size = 4, .num_workers = workers});
      for (auto& batch : loader) {
        for (int64_t i = 0; i < batch.target.size(0); ++i) {
          samples[batch.target[i].item<int64_t>()] = batch.data[i];
        }
      }
    }
    return samples;
  };
  for (int64_t epoch : {0, 3}) {
    mapped.set_epoch(epoch);
    const auto expected = by_sample(0, 1);
    ASSERT_EQ(expected.size(), 41u);
    for (const int64_t workers : {0, 1, 3}) {
      for (const int64_t replicas : {1, 2}) {
        const auto samples = by_sample(workers, replicas);
        ASSERT_EQ(samples.size(), 41u);
        for (const auto& [target, data] : samples) {
          ASSERT_TRUE(torch::equal(data, expected.at(target)));
        }
      }
    }
  }
}

TEST(BatchMapDataset, ChangesStackedBatches) {
  const BatchMapDataset doubled(
      MapDataset(numbered_rows(4), [](Sample sample) { return sample; }),
      [](const Sample& batch) { return Sample(batch.data * 2, batch.target); });
  const auto batch = doubled.get_batch(std::vector<size_t>{3, 1});
  EXPECT_TRUE(torch::equal(batch.data, torch::tensor({6, 2}, torch::kLong)));
  const BatchMapDataset data(numbered_rows(4),
                             [](const at::Tensor& x) { return -x; });
  EXPECT_TRUE(torch::equal(data.get_batch(std::vector<size_t>{3, 1}).data,
                           torch::tensor({-3, -1}, torch::kLong)));
  EXPECT_EQ(data.size(), 4u);
}

TEST(BatchMapDataset, DrawsDependOnTheSamplesOfTheBatch) {
  BatchMapDataset mapped(numbered_rows(8), Draw(), {.seed = 1});
  const auto draw = [&](std::vector<size_t> indices) {
    return mapped.get_batch(indices).data.item<double>();
  };
  const double first = draw({1, 2, 3});
  EXPECT_EQ(draw({1, 2, 3}), first);
  EXPECT_NE(draw({1, 3, 2}), first);
  EXPECT_NE(draw({1, 2}), first);
  mapped.set_epoch(1);
  EXPECT_NE(draw({1, 2, 3}), first);
  mapped.set_epoch(0);
  EXPECT_EQ(draw({1, 2, 3}), first);
}

TEST(BatchMapDataset, WorkersDoNotChangeTheBatches) {
  BatchMapDataset mapped(
      MapDataset(numbered_rows(30), Draw()),
      [](const Sample& batch, SampleRandom& random) {
        // Mixes each sample with a random other one.
        const auto order =
            torch::randperm(batch.data.size(0), random.generator());
        return Sample(
            batch.data * 0.7 + batch.data.index_select(0, order) * 0.3,
            batch.target);
      });
  std::vector<at::Tensor> expected;
  for (const int64_t workers : {0, 1, 3}) {
    DistributedSampler sampler(30);
    DataLoader loader(mapped, sampler,
                      {.batch_size = 7, .num_workers = workers});
    std::vector<at::Tensor> batches;
    for (auto& batch : loader) batches.push_back(batch.data);
    if (expected.empty()) expected = batches;
    ASSERT_EQ(batches.size(), expected.size());
    for (size_t i = 0; i < batches.size(); ++i) {
      EXPECT_TRUE(torch::equal(batches[i], expected[i])) << workers;
    }
  }
}

TEST(Compose, AppliesInOrderWithOneSequenceOfRandomNumbers) {
  const auto times = [](const at::Tensor& x, SampleRandom& random) {
    return x * random.integer(2, 1000);
  };
  const Compose chain([](const at::Tensor& x) { return x + 1; }, times,
                      [](Sample sample, SampleRandom& random) {
                        return Sample(sample.data,
                                      torch::tensor(random.integer(0, 1000)));
                      });
  const MapDataset mapped(numbered_rows(4), chain, {.seed = 8});
  SampleRandom expected(8, 0, 2);
  const int64_t factor = expected.integer(2, 1000);
  EXPECT_EQ(mapped.get(2).data.item<int64_t>(), 3 * factor);
  EXPECT_EQ(mapped.get(2).target.item<int64_t>(), expected.integer(0, 1000));
  // A chain is a transform, too.
  const Compose nested(chain, chain);
  EXPECT_EQ(MapDataset(numbered_rows(4), nested, {.seed = 8})
                .get(0)
                .data.item<int64_t>(),
            [&] {
              SampleRandom random(8, 0, 0);
              const int64_t a = random.integer(2, 1000);
              random.integer(0, 1000);
              return (a + 1) * random.integer(2, 1000);
            }());
}

TEST(SampleRandom, IsUniform) {
  SampleRandom random(1, 2, 3);
  constexpr int kDraws = 20000;
  double sum = 0;
  double squares = 0;
  std::array<int, 7> counts{};
  int heads = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double x = random.uniform(-1, 3);
    ASSERT_GE(x, -1);
    ASSERT_LT(x, 3);
    sum += x;
    squares += x * x;
    const int64_t n = random.integer(-3, 4);
    ASSERT_GE(n, -3);
    ASSERT_LE(n, 3);
    ++counts[static_cast<size_t>(n + 3)];
    heads += random.chance(0.25) ? 1 : 0;
  }
  // Five standard deviations of each sum.
  EXPECT_NEAR(sum / kDraws, 1, 0.041);
  EXPECT_NEAR(squares / kDraws, 1 + 16.0 / 12, 0.09);
  for (const int count : counts) EXPECT_NEAR(count, kDraws / 7.0, 250);
  EXPECT_NEAR(heads, kDraws / 4.0, 310);
  EXPECT_FALSE(random.chance(0));
  EXPECT_TRUE(random.chance(1));
  EXPECT_EQ(random.uniform(2, 2), 2.0);
}

TEST(SampleRandom, ChoosesFromTheWholeRangeOfIntegers) {
  SampleRandom random(0, 0, 0);
  EXPECT_EQ(random.integer(5, 6), 5);
  bool low = false;
  bool high = false;
  for (int i = 0; i < 100; ++i) {
    const int64_t n = random.integer(INT64_MIN, INT64_MAX);
    (n < 0 ? low : high) = true;
  }
  EXPECT_TRUE(low && high);
  EXPECT_THAT([&] { random.integer(3, 3); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("integer(3, 3) has no number to choose")));
}

// The numbers are part of the contract: a run that is resumed by a later
// version augments as before. The first one was computed with another program,
// from the definitions of Philox and SplitMix64.
TEST(SampleRandom, StaysTheSame) {
  SampleRandom random(1, 2, 3, 4);
  const uint64_t first = random.bits();
  SampleRandom again(1, 2, 3, 4);
  EXPECT_EQ(again.bits(), first);
  EXPECT_EQ(first, 0x2bb2132bd0ba27f6);
  for (const auto& other :
       {SampleRandom(2, 2, 3, 4), SampleRandom(1, 3, 3, 4),
        SampleRandom(1, 2, 4, 4), SampleRandom(1, 2, 3, 5),
        SampleRandom(2, 1, 3, 4), SampleRandom(1, 2, 4, 3)}) {
    SampleRandom copy = other;
    EXPECT_NE(copy.bits(), first);
  }
}

}  // namespace
}  // namespace lockstep::internal
