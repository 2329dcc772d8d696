#include "lockstep/data/bucket_batch_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using BucketBatches = std::vector<std::vector<size_t>>;
using Lengths = std::vector<int64_t>;
using Options = BucketBatchSamplerOptions;

Lengths random_lengths(int64_t samples, int64_t longest) {
  std::minstd_rand random(5);
  Lengths lengths;
  for (int64_t i = 0; i < samples; ++i) {
    lengths.push_back(static_cast<int64_t>(random()) % (longest + 1));
  }
  return lengths;
}

BucketBatches batches_of(const BatchList& list) {
  BucketBatches batches;
  size_t begin = 0;
  for (const size_t end : list.ends) {
    batches.emplace_back(list.indices.begin() + begin,
                         list.indices.begin() + end);
    begin = end;
  }
  EXPECT_EQ(begin, list.indices.size());
  EXPECT_EQ(list.places.size(), list.indices.size());
  return batches;
}

// Returns the batches of each rank in one epoch.
std::vector<BucketBatches> of_all_ranks(const Lengths& lengths, Options options,
                                        int64_t ranks, int64_t epoch = 0) {
  std::vector<BucketBatches> all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    options.num_replicas = ranks;
    options.rank = rank;
    BucketBatchSampler sampler(lengths, options);
    sampler.set_epoch(epoch);
    all.push_back(batches_of(sampler.begin_pass()));
    EXPECT_EQ(static_cast<int64_t>(all.back().size()), sampler.size());
  }
  return all;
}

std::vector<Options> ways() {
  return {{.batch_size = 4, .boundaries = {10, 20, 40}},
          {.batch_size = 4, .boundaries = {1000}},
          {.batch_size = 3, .window = 5},
          {.batch_size = 4, .window = 1},
          {.batch_size = 5},
          {.batch_size = 4, .boundaries = {10, 20, 40}, .shuffle = false},
          {.batch_size = 3, .window = 2, .shuffle = false}};
}

TEST(BucketBatchSampler, CutsTheSamplesOfEachBucket) {
  // Buckets: below 3; 3 and 4; from 5 on.
  const Lengths lengths{5, 1, 3, 9, 2, 4, 0, 7, 4};
  BucketBatchSampler sampler(
      lengths, {.batch_size = 2, .boundaries = {3, 5}, .shuffle = false});
  EXPECT_EQ(batches_of(sampler.begin_pass()),
            (BucketBatches{{1, 4}, {2, 5}, {0, 3}, {6}, {8}, {7}}));
  EXPECT_EQ(sampler.size(), 6);
  BucketBatchSampler dropping(lengths, {.batch_size = 2,
                                        .boundaries = {3, 5},
                                        .shuffle = false,
                                        .drop_last = true});
  EXPECT_EQ(batches_of(dropping.begin_pass()),
            (BucketBatches{{1, 4}, {2, 5}, {0, 3}}));
  EXPECT_EQ(dropping.size(), 3);
}

TEST(BucketBatchSampler, SortsWithinWindows) {
  // Windows of two batches: 5 1 3 9, 2 4 0 7, 4.
  const Lengths lengths{5, 1, 3, 9, 2, 4, 0, 7, 4};
  BucketBatchSampler sampler(lengths,
                             {.batch_size = 2, .window = 2, .shuffle = false});
  EXPECT_EQ(batches_of(sampler.begin_pass()),
            (BucketBatches{{1, 2}, {0, 3}, {6, 4}, {5, 7}, {8}}));
}

TEST(BucketBatchSampler, SharesEachStepBetweenTheRanks) {
  // One bucket of 7 samples; steps of 4 places, the last of 3.
  const Lengths lengths(7, 1);
  const auto shared = [&](bool drop_last, bool pad) {
    return of_all_ranks(lengths,
                        {.batch_size = 2,
                         .boundaries = {5},
                         .shuffle = false,
                         .drop_last = drop_last,
                         .pad = pad},
                        2);
  };
  EXPECT_EQ(shared(false, true),
            (std::vector<BucketBatches>{{{0, 2}, {4, 6}}, {{1, 3}, {5, 4}}}));
  EXPECT_EQ(shared(false, false),
            (std::vector<BucketBatches>{{{0, 2}, {4, 6}}, {{1, 3}, {5}}}));
  EXPECT_EQ(shared(true, true),
            (std::vector<BucketBatches>{{{0, 2}}, {{1, 3}}}));
  // Buckets of 1 and of 3 samples. The smaller one is last: rank 1, which gets
  // none of it, has its batches in the same steps as rank 0 up to there.
  EXPECT_EQ(
      of_all_ranks(
          {1, 9, 9, 9},
          {.batch_size = 2, .boundaries = {5}, .shuffle = false, .pad = false},
          2),
      (std::vector<BucketBatches>{{{1, 3}, {0}}, {{2}}}));
  // A step with fewer samples than ranks: without padding a rank has no batch.
  EXPECT_EQ(of_all_ranks({1}, {.pad = false}, 2),
            (std::vector<BucketBatches>{{{0}}, {}}));
  EXPECT_EQ(of_all_ranks({1}, {}, 3),
            (std::vector<BucketBatches>{{{0}}, {{0}}, {{0}}}));
  EXPECT_EQ(of_all_ranks({}, {}, 2), (std::vector<BucketBatches>{{}, {}}));
}

TEST(BucketBatchSampler, EverySampleIsVisitedAndRanksAgree) {
  const Lengths lengths = random_lengths(203, 60);
  for (Options options : ways()) {
    for (int64_t ranks : {1, 2, 3, 8}) {
      options.drop_last = false;
      options.pad = true;
      auto padded = of_all_ranks(lengths, options, ranks, 3);
      std::map<size_t, int> times;
      for (const BucketBatches& batches : padded) {
        EXPECT_EQ(batches.size(), padded[0].size());
        for (size_t step = 0; step < batches.size(); ++step) {
          EXPECT_EQ(batches[step].size(), padded[0][step].size());
          for (size_t sample : batches[step]) ++times[sample];
        }
      }
      EXPECT_EQ(times.size(), lengths.size());

      options.pad = false;
      times.clear();
      for (const BucketBatches& batches :
           of_all_ranks(lengths, options, ranks, 3)) {
        for (const auto& batch : batches) {
          EXPECT_FALSE(batch.empty());
          for (size_t sample : batch) ++times[sample];
        }
      }
      EXPECT_EQ(times.size(), lengths.size());
      for (auto [sample, count] : times) EXPECT_EQ(count, 1) << sample;

      options.drop_last = true;
      std::set<size_t> seen;
      const auto dropped = of_all_ranks(lengths, options, ranks, 3);
      for (const BucketBatches& batches : dropped) {
        EXPECT_EQ(batches.size(), dropped[0].size());
        for (const auto& batch : batches) {
          EXPECT_EQ(static_cast<int64_t>(batch.size()), options.batch_size);
          for (size_t sample : batch) EXPECT_TRUE(seen.insert(sample).second);
        }
      }
      const size_t buckets = options.boundaries.size() + 1;
      EXPECT_GT(seen.size() + buckets * options.batch_size * ranks,
                lengths.size());
    }
  }
}

// The longest and the shortest sample of all ranks in a step.
TEST(BucketBatchSampler, AStepHasSimilarLengthsOnAllRanks) {
  const Lengths lengths = random_lengths(2000, 100);
  for (int64_t ranks : {1, 4}) {
    auto buckets = of_all_ranks(
        lengths, {.batch_size = 5, .boundaries = {25, 50, 75}}, ranks);
    auto windows =
        of_all_ranks(lengths, {.batch_size = 5, .window = 20}, ranks);
    for (size_t step = 0; step < buckets[0].size(); ++step) {
      std::set<int64_t> seen;
      for (const BucketBatches& batches : buckets) {
        for (size_t sample : batches[step]) seen.insert(lengths[sample] / 25);
      }
      seen.erase(4);  // 100 is in the bucket of 75
      EXPECT_LE(seen.size(), 1u);
    }
    int64_t spread = 0;
    for (size_t step = 0; step < windows[0].size(); ++step) {
      int64_t shortest = 100, longest = 0;
      for (const BucketBatches& batches : windows) {
        for (size_t sample : batches[step]) {
          shortest = std::min(shortest, lengths[sample]);
          longest = std::max(longest, lengths[sample]);
        }
      }
      spread += longest - shortest;
    }
    // 20 steps share 0 to 100 between them; unsorted it would be 67 and more.
    EXPECT_LT(spread, 10 * static_cast<int64_t>(windows[0].size()));
  }
}

TEST(BucketBatchSampler, TheOrderDependsOnSeedAndEpoch) {
  const Lengths lengths = random_lengths(100, 30);
  for (const Options& options :
       {Options{.batch_size = 4, .boundaries = {10, 20}},
        Options{.batch_size = 4, .window = 3}}) {
    BucketBatchSampler sampler(lengths, options), other(lengths, options);
    const BucketBatches first = batches_of(sampler.begin_pass());
    EXPECT_EQ(batches_of(sampler.begin_pass()), first);
    EXPECT_EQ(batches_of(other.begin_pass()), first);
    sampler.set_epoch(1);
    EXPECT_NE(batches_of(sampler.begin_pass()), first);
    Options seeded = options;
    seeded.seed = 1;
    BucketBatchSampler shifted(lengths, seeded);
    EXPECT_NE(batches_of(shifted.begin_pass()), first);
    sampler.set_epoch(0);
    EXPECT_EQ(batches_of(sampler.begin_pass()), first);
    // Groups are shuffled: lengths do not ascend through the epoch.
    Lengths of_batches;
    for (const auto& batch : first) of_batches.push_back(lengths[batch[0]]);
    EXPECT_FALSE(std::ranges::is_sorted(of_batches));
  }
}

// Repeated samples had the place, and so the random numbers, of the first time.
TEST(BucketBatchSampler, APlaceIsVisitedOnce) {
  for (const auto& options : ways()) {
    std::set<int64_t> places;
    size_t visits = 0;
    std::map<int64_t, size_t> samples;  // by place within the dataset
    const Lengths lengths = random_lengths(23, 50);
    for (int64_t rank = 0; rank < 7; ++rank) {
      Options own = options;
      own.num_replicas = 7;
      own.rank = rank;
      BucketBatchSampler sampler(lengths, own);
      const BatchList list = sampler.begin_pass();
      visits += list.places.size();
      for (size_t i = 0; i < list.places.size(); ++i) {
        places.insert(list.places[i]);
        const auto [known, is_new] =
            samples.emplace(list.places[i] % 23, list.indices[i]);
        EXPECT_EQ(known->second, list.indices[i]);
      }
    }
    EXPECT_GT(visits, 23u);
    EXPECT_EQ(places.size(), visits);
    EXPECT_EQ(samples.size(), 23u);
  }
}

// A step did not fit an int64, and size() did not end.
TEST(BucketBatchSampler, ABatchMayHoldEverySample) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const int64_t size : {kHuge, kHuge / 2, kHuge / 3 + 1}) {
    for (Options options : {Options{.boundaries = {10}}, Options{}}) {
      options.batch_size = size;
      for (const auto& batches :
           of_all_ranks(random_lengths(9, 9), options, 3)) {
        ASSERT_EQ(batches.size(), 1u);
        EXPECT_EQ(batches[0].size(), 3u);
      }
    }
  }
}

TEST(BucketBatchSampler, RefusesBadArguments) {
  const auto refuses = [](const Lengths& lengths, const Options& options,
                          const char* message) {
    EXPECT_THAT([&] { BucketBatchSampler(lengths, options); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(message)));
  };
  refuses({1, -2}, {}, "the length of sample 1 is -2");
  refuses({1}, {.batch_size = 0}, "batch_size is 0");
  refuses({1}, {.window = 0}, "window is 0 steps");
  refuses({1}, {.boundaries = {1}, .window = 5},
          "both boundaries and a window");
  refuses({1}, {.boundaries = {1, 5, 5}}, "boundary 5 follows 5");
  refuses({1}, {.num_replicas = 2, .rank = 2}, "BucketBatchSampler: rank is 2");
}

TEST(BucketBatchSampler, RefusesAForeignState) {
  const Lengths lengths = random_lengths(30, 30);
  BucketBatchSampler sampler(lengths, {.batch_size = 4});
  sampler.begin_pass();
  sampler.consumed_batch();
  const auto state = sampler.state_dict();
  const auto refuses = [&](BucketBatchSampler other, const auto& loaded,
                           const char* message) {
    const auto before = other.state_dict();
    EXPECT_THAT([&] { other.load_state_dict(loaded); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(message)));
    EXPECT_EQ(other.state_dict(), before);
  };
  refuses({random_lengths(31, 30), {}}, state, "for a dataset of 30 samples");
  refuses({Lengths(30, 1), {}}, state, "with other buckets than this sampler");
  refuses({lengths, {.window = 4}}, state, "with other buckets");
  refuses({lengths, {.boundaries = {4}}}, state, "with other buckets");
  refuses({lengths, {.shuffle = false}}, state, "with shuffle = true");
  refuses({lengths, {.drop_last = true}}, state, "with drop_last = false");
  auto damaged = state;
  damaged["step_size"] = 0;
  refuses({lengths, {}}, damaged, "step_size is 0");
  damaged = state;
  damaged["position"] = 31;
  refuses({lengths, {}}, damaged, "position is 31");
  damaged = state;
  damaged.erase("step_size");
  refuses({lengths, {}}, damaged, "no entry \"step_size\"");
  sampler.load_state_dict({});
  EXPECT_EQ(sampler.state_dict(), state);
}

}  // namespace
}  // namespace lockstep::internal
