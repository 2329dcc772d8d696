#include "lockstep/data/sample_random.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <set>

#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/bucket_batch_sampler.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/samplers.h"

namespace lockstep::internal {
namespace {

using Seeded = std::pair<size_t, uint64_t>;

// Gives each sample's index and seed.
struct Seeds {
  Seeded get(size_t index, SampleSeed seed) const {
    return {index, seed.value};
  }
  size_t size() const { return 60; }
};
// The same, in whole batches.
struct SeedBatches {
  std::vector<Seeded> get_batch(c10::ArrayRef<size_t> indices,
                                c10::ArrayRef<SampleSeed> seeds) const {
    std::vector<Seeded> batch;
    for (size_t i = 0; i < indices.size(); ++i) {
      batch.emplace_back(indices[i], seeds[i].value);
    }
    return batch;
  }
  size_t size() const { return 60; }
};

template <class Dataset, class Sampler>
std::vector<Seeded> seeds_of(const Dataset& dataset, Sampler& sampler,
                             DataLoaderOptions options) {
  DataLoader loader(dataset, sampler, options,
                    [](std::vector<Seeded> samples) { return samples; });
  std::vector<Seeded> seeds;
  for (const auto& batch : loader) {
    seeds.insert(seeds.end(), batch.begin(), batch.end());
  }
  return seeds;
}

TEST(SampleSeed, DoesNotDependOnWorkersBatchesOrRanks) {
  const auto seeds_by_sample = [](int64_t epoch, int64_t ranks,
                                  DataLoaderOptions options) {
    std::map<size_t, uint64_t> seeds;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      DistributedSampler sampler(60, {.num_replicas = ranks, .rank = rank});
      sampler.set_epoch(epoch);
      auto mine = seeds_of(Seeds(), sampler, options);
      seeds.insert(mine.begin(), mine.end());
    }
    return seeds;
  };
  const auto expected = seeds_by_sample(3, 1, {.batch_size = 4});
  EXPECT_EQ(expected.size(), 60u);
  for (int64_t ranks : {1, 2, 3}) {
    for (int64_t workers : {0, 1, 3}) {
      EXPECT_EQ(
          seeds_by_sample(3, ranks, {.batch_size = 7, .num_workers = workers}),
          expected);
    }
  }
  std::set<uint64_t> distinct;
  for (auto [index, seed] : expected) distinct.insert(seed);
  EXPECT_EQ(distinct.size(), 60u);
  EXPECT_NE(seeds_by_sample(4, 1, {}), expected);
  EXPECT_NE(seeds_by_sample(3, 1, {.seed = 1}), expected);
}

TEST(SampleSeed, IsTheSameAfterResuming) {
  DistributedSampler sampler(60, {.num_replicas = 1, .rank = 0});
  sampler.set_epoch(2);
  const auto whole = seeds_of(Seeds(), sampler, {.batch_size = 4});
  sampler.begin_pass();
  sampler.consumed(24);
  DistributedSampler resumed(60, {.num_replicas = 1, .rank = 0});
  resumed.load_state_dict(sampler.state_dict());
  EXPECT_EQ(seeds_of(Seeds(), resumed, {.batch_size = 9}),
            std::vector<Seeded>(whole.begin() + 24, whole.end()));
}

TEST(SampleSeed, IsGivenForWholeBatchesToo) {
  DistributedSampler sampler(60, {.num_replicas = 2, .rank = 1});
  EXPECT_EQ(seeds_of(SeedBatches(), sampler, {.batch_size = 7}),
            seeds_of(Seeds(), sampler, {.batch_size = 5}));

  const std::vector<int64_t> lengths(60, 1);
  BucketBatchSampler batches(lengths,
                             {.batch_size = 5, .num_replicas = 2, .rank = 1});
  const auto seeds = seeds_of(SeedBatches(), batches, {});
  EXPECT_EQ(seeds.size(), 30u);
  EXPECT_EQ(seeds, seeds_of(Seeds(), batches, {.num_workers = 2}));
  // One rank with the batches of both.
  BucketBatchSampler alone(lengths,
                           {.batch_size = 10, .num_replicas = 1, .rank = 0});
  const auto all = seeds_of(Seeds(), alone, {});
  std::vector<Seeded> mine;
  for (size_t i = 1; i < all.size(); i += 2) mine.push_back(all[i]);
  EXPECT_EQ(seeds, mine);
}

// A rare sample that is drawn often is augmented differently each time.
TEST(SampleSeed, DiffersIfASampleIsDrawnTwice) {
  std::vector<double> weights(Seeds().size());
  weights[0] = 1;
  WeightedRandomSampler sampler(weights, 20);
  std::set<uint64_t> distinct;
  for (auto [index, seed] : seeds_of(Seeds(), sampler, {})) {
    EXPECT_EQ(index, 0u);
    distinct.insert(seed);
  }
  EXPECT_EQ(distinct.size(), 20u);
}

// A sampler of the user's own may say nothing of epochs: a second pass must not
// augment as the first did.
TEST(SampleSeed, DiffersInEveryPassOfASamplerWithoutEpochs) {
  struct InOrder : Sampler {
    std::vector<size_t> begin_pass() override { return {0, 1, 2, 3}; }
    void consumed(int64_t) override {}
    int64_t size() const override { return 4; }
    int64_t dataset_size() const override { return 60; }
  } sampler;
  BatchSampler batches(sampler, 2);
  const auto passes_differ = [](auto& own, DataLoaderOptions options) {
    const Seeds dataset;
    DataLoader loader(dataset, own, options,
                      [](std::vector<Seeded> samples) { return samples; });
    std::set<uint64_t> distinct;
    for (int pass = 0; pass < 3; ++pass) {
      for (const auto& batch : loader) {
        for (const auto& [index, seed] : batch) distinct.insert(seed);
      }
    }
    EXPECT_EQ(distinct.size(), 12u);
  };
  passes_differ(sampler, {.batch_size = 2});
  passes_differ(batches, {.num_workers = 2});
}

// A sampler of the user's own says nothing of places; ranks still differ.
TEST(SampleSeed, DependsOnTheIndex) {
  EXPECT_NE(sample_seed(0, 0, 0, 1).value, sample_seed(0, 0, 0, 2).value);
  EXPECT_NE(sample_seed(0, 0, 1, 0).value, sample_seed(0, 1, 0, 0).value);
}

// The numbers are part of the contract, as those of SampleRandom: these were
// computed with another program, from the definition of SplitMix64.
TEST(SampleSeed, StaysTheSame) {
  EXPECT_EQ(sample_seed(1, 2, 3, 4).value, 0x336c3255cbcc01fe);
  EXPECT_EQ(SampleSeed{4}.derived().value, 0x6e73e372e2338aca);
  std::set<uint64_t> distinct;
  for (const SampleSeed seed :
       {sample_seed(1, 2, 3, 4), sample_seed(2, 2, 3, 4),
        sample_seed(1, 3, 3, 4), sample_seed(1, 2, 4, 4),
        sample_seed(1, 2, 3, 5), sample_seed(2, 1, 3, 4),
        sample_seed(1, 3, 2, 4), sample_seed(1, 2, 4, 3)}) {
    distinct.insert(seed.value);
    distinct.insert(seed.derived().value);
  }
  EXPECT_EQ(distinct.size(), 16u);
}

TEST(SampleSeed, MakesAGenerator) {
  const SampleSeed seed{7};
  auto first = seed.generator(), second = seed.generator();
  const auto draw = [](at::Generator& generator) {
    return torch::rand({4}, generator);
  };
  const at::Tensor drawn = draw(first);
  EXPECT_TRUE(torch::equal(draw(second), drawn));
  EXPECT_FALSE(torch::equal(draw(second), drawn));
}

}  // namespace
}  // namespace lockstep::internal
