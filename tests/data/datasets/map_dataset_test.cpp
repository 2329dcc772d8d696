// MapDataset, BatchMapDataset, Compose, SampleRandom.

#include "lockstep/data/datasets/map_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <type_traits>

#include "lockstep/data/data_loader.h"
#include "lockstep/data/datasets/any_dataset.h"
#include "lockstep/data/datasets/selected_samples.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/data/transforms.h"

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

template <class D, class... Seed>
double drawn(const D& dataset, size_t index, Seed... seed) {
  return dataset.get(index, seed...).data.template item<double>();
}

// Returns the data of all samples as a loader gives them in one epoch, in the
// dataset's order.
template <class D>
at::Tensor loaded(const D& dataset, int64_t epoch,
                  DataLoaderOptions options = {.batch_size = 3}) {
  DistributedSampler sampler(static_cast<int64_t>(dataset.size()),
                             {.shuffle = false});
  sampler.set_epoch(epoch);
  DataLoader loader(dataset, sampler, options);
  std::vector<at::Tensor> data;
  for (auto& batch : loader) data.push_back(batch.data.view({-1}));
  return torch::cat(data);
}

bool all_differ(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() > 0 && (a != b).all().item<bool>();
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
}

TEST(MapDataset, GivesRandomNumbersIfTheTransformTakesThem) {
  const auto rows = numbered_rows(4);
  const MapDataset whole(rows, [](Sample sample, SampleRandom& random) {
    sample.target = torch::tensor(random.uniform());
    return sample;
  });
  const MapDataset data(rows, Draw());
  const SampleSeed seed{5};
  SampleRandom expected(seed);
  const double first = expected.uniform();
  EXPECT_FLOAT_EQ(whole.get(3, seed).target.item<float>(),
                  static_cast<float>(first));
  EXPECT_EQ(drawn(data, 3, seed), first);
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

TEST(MapDataset, DrawsDependOnTheSeedOnly) {
  const MapDataset mapped(numbered_rows(50), Draw());
  EXPECT_EQ(drawn(mapped, 1, SampleSeed{8}), drawn(mapped, 2, SampleSeed{8}));
  EXPECT_NE(drawn(mapped, 1, SampleSeed{8}), drawn(mapped, 1, SampleSeed{9}));
}

// A program that looks at single samples has no seeds.
TEST(MapDataset, GivesASampleWithoutSeedTheSameNumbersEachTime) {
  const MapDataset mapped(numbered_rows(50), Draw());
  std::set<double> distinct;
  for (size_t i = 0; i < 50; ++i) {
    distinct.insert(drawn(mapped, i));
    EXPECT_EQ(drawn(mapped, i), drawn(mapped, i));
  }
  EXPECT_EQ(distinct.size(), 50u);
  EXPECT_EQ(drawn(Subset(mapped, {7}), 0), drawn(mapped, 7));
  const auto first_epoch = loaded(mapped, 0);
  for (int64_t i = 0; i < 50; ++i) {
    EXPECT_EQ(first_epoch[i].item<double>(), drawn(mapped, size_t(i)));
  }
}

// Nothing but the sampler's epoch is needed; a dataset that lost the seeds on
// their way would augment every epoch alike.
TEST(MapDataset, EveryEpochOfALoaderDrawsOtherNumbers) {
  const MapDataset once(numbered_rows(6), Draw());
  const auto changes = [](const auto& dataset) {
    const auto first = loaded(dataset, 0);
    EXPECT_TRUE(all_differ(loaded(dataset, 1), first));
    EXPECT_TRUE(torch::equal(loaded(dataset, 0), first)) << "again";
    EXPECT_TRUE(
        all_differ(loaded(dataset, 0, {.batch_size = 3, .seed = 1}), first));
  };
  changes(once);
  changes(Subset(once, {3, 4}));
  changes(TakeDataset(once, 2));
  changes(ShuffledDataset(once, 0));
  changes(RepeatedDataset(once, 2));
  changes(random_split(once, {3, 3}, 0)[1]);
  changes(ConcatDataset(once, once));
  changes(AnyDataset<>(once));
  changes(Subset(ConcatDataset(once, AnyDataset<>(once)), {11, 0, 5}));
  changes(TakeDataset(ConcatDataset(numbered_rows(3), once), 6, 3));
  changes(MapDataset(once, [](Sample sample) { return sample; }));
  using Map = std::remove_const_t<decltype(once)>;
  changes(TakeDataset(std::make_shared<Map>(once), 2));
  changes(TakeDataset(std::make_shared<const Map>(once), 2));
  changes(BatchMapDataset(once, [](Sample sample) { return sample; }));
  changes(BatchMapDataset(numbered_rows(6), Draw()));
  changes(Subset(BatchMapDataset(numbered_rows(6), Draw()), {3, 4}));
}

// Two transforms must not draw the same numbers: a crop on the left would
// always be flipped.
TEST(MapDataset, OnTopOfAnotherDrawsOtherNumbers) {
  const auto add = [](const at::Tensor& x, SampleRandom& random) {
    return torch::stack(
        {x.view({-1})[-1], torch::tensor(random.uniform(), torch::kDouble)});
  };
  const auto pair = [&](const auto& below) {
    const MapDataset above(below, add);
    for (const auto& numbers :
         {above.get(0).data, above.get(0, SampleSeed{3}).data,
          MapDataset(above, add).get(0, SampleSeed{3}).data,
          BatchMapDataset(below, add).get_batch(size_t{0}).data,
          BatchMapDataset(BatchMapDataset(below, add), add)
              .get_batch(size_t{0})
              .data}) {
      EXPECT_NE(numbers[0].template item<double>(),
                numbers[1].template item<double>());
    }
  };
  const MapDataset once(numbered_rows(3), Draw());
  pair(once);
  pair(Subset(once, {0}));
  pair(TakeDataset(once, 1));
  pair(RepeatedDataset(once, 2));
  pair(AnyDataset<>(once));
  pair(ConcatDataset(once, once));
  pair(MapDataset(once, [](Sample sample) { return sample; }));
}

TEST(MapDataset, AugmentsEachRepetitionOfASample) {
  const auto repetitions_differ = [](const auto& dataset) {
    const auto drawn = loaded(dataset, 0);
    EXPECT_TRUE(all_differ(drawn.slice(0, 0, 2), drawn.slice(0, 2, 4)));
  };
  const auto rows = numbered_rows(2);
  repetitions_differ(MapDataset(RepeatedDataset(rows, 2), Draw()));
  repetitions_differ(RepeatedDataset(MapDataset(rows, Draw()), 2));
  repetitions_differ(Subset(MapDataset(rows, Draw()), {0, 1, 0, 1}));
}

// A dataset of tensors makes a batch by one gather, for which seeds would be
// computed in vain.
TEST(MapDataset, OnlyDatasetsThatDrawTakeSeeds) {
  const auto rows = numbered_rows(4);
  const MapDataset mapped(rows, Draw());
  const auto takes_seeds = [](const auto& dataset) {
    return kTakesSeeds<std::remove_cvref_t<decltype(dataset)>>;
  };
  EXPECT_FALSE(takes_seeds(Subset(rows, {0})));
  EXPECT_FALSE(takes_seeds(RepeatedDataset(ShuffledDataset(rows, 0), 2)));
  EXPECT_FALSE(takes_seeds(ConcatDataset(rows, rows)));
  EXPECT_TRUE(takes_seeds(Subset(mapped, {0})));
  EXPECT_TRUE(takes_seeds(RepeatedDataset(ShuffledDataset(mapped, 0), 2)));
  EXPECT_TRUE(takes_seeds(ConcatDataset(mapped, mapped)));
}

// Users' datasets of all kinds that take seeds, below others.
// Returns the numbers of a batch, whether it was collated or not.
struct Values {
  std::vector<uint64_t> operator()(const std::vector<uint64_t>& values) const {
    return values;
  }
  std::vector<uint64_t> operator()(const at::Tensor& collated) const {
    const auto* const values = collated.const_data_ptr<int64_t>();
    return {values, values + collated.numel()};
  }
};

TEST(MapDataset, GivesSeedsToTheDatasetBelow) {
  struct Single {
    uint64_t get(size_t, SampleSeed seed) const { return seed.value; }
    size_t size() const { return 4; }
  };
  struct Batches {
    std::vector<uint64_t> get_batch(c10::ArrayRef<size_t>,
                                    c10::ArrayRef<SampleSeed> seeds) const {
      std::vector<uint64_t> values;
      for (const SampleSeed seed : seeds) values.push_back(seed.value);
      return values;
    }
    size_t size() const { return 4; }
  };
  const auto same = [](uint64_t value) { return value; };
  const auto gets = [&](const auto& dataset) {
    const uint64_t below = SampleSeed{9}.derived().value;
    EXPECT_NE(below, 9u);
    EXPECT_EQ(MapDataset(dataset, same).get(2, {9}), below);
    EXPECT_EQ(MapDataset(dataset, same).get(2),
              seed_of_index(2).derived().value);
    const TakeDataset taken(dataset, 2, 1);
    EXPECT_EQ(taken.get(0, {9}), 9u);
    EXPECT_EQ(taken.get(0), seed_of_index(1).value);
    const std::vector<size_t> both{0, 1};
    const std::vector<SampleSeed> seeds{{7}, {8}};
    EXPECT_EQ(taken.get_batch(both, seeds), (std::vector<uint64_t>{7, 8}));
    EXPECT_EQ(taken.get_batch(both),
              (std::vector<uint64_t>{seed_of_index(1).value,
                                     seed_of_index(2).value}));
    const BatchMapDataset batches(dataset, Values());
    EXPECT_EQ(batches.get_batch(both, seeds),
              (std::vector<uint64_t>{SampleSeed{7}.derived().value,
                                     SampleSeed{8}.derived().value}));
  };
  gets(Single());
  gets(Batches());
  gets(std::make_shared<Single>());
}

TEST(MapDataset, NeitherWorkersNorBatchesNorRanksNorResumingChangeTheSamples) {
  const auto augment = [](Sample sample, SampleRandom& random) {
    auto noise = torch::randn({2}, random.generator());
    return Sample(sample.data + noise * random.uniform(), sample.target);
  };
  // Draws by itself.
  struct Shifted {
    Sample get(size_t index, SampleSeed seed) const {
      const auto number = static_cast<int64_t>(index);
      return {torch::randn({2}, seed.generator()), torch::tensor(number)};
    }
    size_t size() const { return 40; }
  };
  // 82 samples from several kinds of datasets, some more than once.
  const MapDataset below(numbered_rows(41), augment);
  const MapDataset mapped(
      ConcatDataset(
          Subset(AnyDataset<>(below), {40, 3, 3, 17, 3, 0, 9}),
          RepeatedDataset(ShuffledDataset(TakeDataset(below, 17, 8), 3), 2),
          AnyDataset<>(RepeatedDataset(std::make_shared<Shifted>(), 1)),
          TakeDataset(numbered_rows(41), 1)),
      augment);
  ASSERT_EQ(mapped.size(), 82u);
  using Samples = std::multimap<int64_t, std::pair<float, float>>;
  const auto visit = [&](Samples& samples, DistributedSampler& sampler,
                         DataLoaderOptions options, int64_t batches) {
    DataLoader loader(mapped, sampler, options);
    for (auto& batch : loader) {
      for (int64_t i = 0; i < batch.target.size(0); ++i) {
        samples.emplace(batch.target[i].item<int64_t>(),
                        std::pair(batch.data[i][0].item<float>(),
                                  batch.data[i][1].item<float>()));
      }
      if (--batches == 0) break;
    }
    return sampler.state_dict();
  };
  const auto sorted = [](const Samples& samples) {
    std::vector<std::pair<int64_t, std::pair<float, float>>> list(
        samples.begin(), samples.end());
    std::sort(list.begin(), list.end());
    return list;
  };
  for (const int64_t epoch : {0, 3}) {
    // The expected values come from the seeds alone, without a loader.
    DistributedSampler alone(82);
    alone.set_epoch(epoch);
    const auto order = alone.indices();
    Samples whole;
    for (size_t place = 0; place < 82; ++place) {
      const Sample sample = mapped.get(
          order[place], sample_seed(0, epoch, int64_t(place), order[place]));
      whole.emplace(sample.target.item<int64_t>(),
                    std::pair(sample.data[0].item<float>(),
                              sample.data[1].item<float>()));
    }
    const auto expected = sorted(whole);
    ASSERT_EQ(std::set(expected.begin(), expected.end()).size(), 82u);
    for (const int64_t workers : {0, 1, 3}) {
      // Two ranks make five steps, then one rank or three go on.
      for (const int64_t ranks : {1, 3}) {
        Samples samples;
        std::map<std::string, int64_t> state;
        for (int64_t rank = 0; rank < 2; ++rank) {
          DistributedSampler sampler(82, {.num_replicas = 2, .rank = rank});
          sampler.set_epoch(epoch);
          state = visit(samples, sampler,
                        {.batch_size = 4, .num_workers = workers}, 5);
        }
        ASSERT_EQ(samples.size(), 40u);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          DistributedSampler sampler(82, {.num_replicas = ranks, .rank = rank});
          sampler.load_state_dict(state);
          visit(samples, sampler,
                {.batch_size = 7,
                 .drop_last = ranks == 3,
                 .num_workers = workers},
                -1);
        }
        EXPECT_EQ(sorted(samples), expected) << workers << ' ' << ranks;
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

// The transform got a vector of tensors, or of pairs.
TEST(BatchMapDataset, GivesTheTransformWhatALoopGets) {
  struct Tensors {
    at::Tensor get(size_t index) const {
      return torch::full({2}, static_cast<double>(index));
    }
    size_t size() const { return 4; }
  };
  struct Pairs {
    std::vector<std::pair<at::Tensor, int64_t>> get_batch(
        c10::ArrayRef<size_t> indices) const {
      std::vector<std::pair<at::Tensor, int64_t>> samples;
      for (const size_t index : indices) samples.push_back(get(index));
      return samples;
    }
    std::pair<at::Tensor, int64_t> get(size_t index) const {
      return {torch::ones({2}), static_cast<int64_t>(index)};
    }
    size_t size() const { return 4; }
  };
  // A dataset that has whole batches only: the loop gets them as they are.
  struct Whole {
    std::vector<at::Tensor> get_batch(c10::ArrayRef<size_t>) const {
      return {torch::ones({2}), torch::zeros({3})};
    }
    size_t size() const { return 4; }
  };
  const auto keep = [](auto batch) { return batch; };
  const std::vector<size_t> indices{3, 1};
  const BatchMapDataset tensors(Tensors(), keep);
  const auto rows = tensors.get_batch(indices);
  static_assert(std::is_same_v<decltype(rows), const at::Tensor>);
  EXPECT_TRUE(torch::equal(rows, torch::tensor({{3., 3.}, {1., 1.}})));
  const BatchMapDataset pairs(std::make_shared<Pairs>(), keep);
  const auto [data, target] = pairs.get_batch(indices);
  EXPECT_TRUE(torch::equal(data, torch::ones({2, 2})));
  EXPECT_TRUE(torch::equal(target, torch::tensor({3, 1})));
  const BatchMapDataset whole(Whole(), keep);
  EXPECT_EQ(whole.get_batch(indices).at(1).size(0), 3);
}

TEST(BatchMapDataset, DrawsDependOnTheSeedsOfTheBatch) {
  const BatchMapDataset mapped(numbered_rows(8), Draw());
  const std::vector<size_t> indices{1, 2, 3};
  const auto draw = [&](std::vector<SampleSeed> seeds) {
    return mapped
        .get_batch(c10::ArrayRef(indices).slice(0, seeds.size()), seeds)
        .data.item<double>();
  };
  const double first = draw({{1}, {2}, {3}});
  EXPECT_EQ(draw({{1}, {2}, {3}}), first);
  EXPECT_NE(draw({{1}, {3}, {2}}), first);
  EXPECT_NE(draw({{1}, {2}}), first);
  EXPECT_NE(draw({{1}, {2}, {4}}), first);

  const auto look = [&](std::vector<size_t> numbers) {
    return mapped.get_batch(numbers).data.item<double>();
  };
  EXPECT_EQ(look({1, 2, 3}), look({1, 2, 3}));
  EXPECT_NE(look({1, 2, 3}), look({1, 3, 2}));
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
  const SampleSeed seed{8};
  const Sample sample = MapDataset(numbered_rows(4), chain).get(2, seed);
  SampleRandom expected(seed);
  const int64_t factor = expected.integer(2, 1000);
  EXPECT_EQ(sample.data.item<int64_t>(), 3 * factor);
  EXPECT_EQ(sample.target.item<int64_t>(), expected.integer(0, 1000));
  // A chain is a transform, too.
  const Compose nested(chain, chain);
  EXPECT_EQ(
      MapDataset(numbered_rows(4), nested).get(0, seed).data.item<int64_t>(),
      [&] {
        SampleRandom random(seed);
        const int64_t a = random.integer(2, 1000);
        random.integer(0, 1000);
        return (a + 1) * random.integer(2, 1000);
      }());
}

TEST(SampleRandom, IsUniform) {
  SampleRandom random(SampleSeed{3});
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
  SampleRandom random(SampleSeed{0});
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
// version augments as before. These were computed with another program, from
// the definition of Philox.
TEST(SampleRandom, StaysTheSame) {
  SampleRandom random(SampleSeed{0x0123456789abcdef});
  EXPECT_EQ(random.bits(), 0xb850222ec58cb04b);
  EXPECT_EQ(random.bits(), 0x14a7a0207a84fff9);
  EXPECT_EQ(random.bits(), 0xadca1466523e0d85);
}

}  // namespace
}  // namespace lockstep::internal
