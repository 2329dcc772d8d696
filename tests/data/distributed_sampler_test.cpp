#include "lockstep/data/distributed_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "lockstep/data/batch_sampler.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Indices = std::vector<size_t>;

DistributedSamplerOptions part(int64_t rank, int64_t num_replicas) {
  return {.num_replicas = num_replicas, .rank = rank};
}

// Returns the indices of all ranks together, sorted.
Indices visited_by_all(const DistributedSamplerOptions& options, int64_t size,
                       int64_t num_replicas) {
  Indices all;
  for (int64_t rank = 0; rank < num_replicas; ++rank) {
    DistributedSamplerOptions own = options;
    own.num_replicas = num_replicas;
    own.rank = rank;
    Indices mine = DistributedSampler(size, own).indices();
    all.insert(all.end(), mine.begin(), mine.end());
  }
  std::ranges::sort(all);
  return all;
}

// The expected values were printed by torch 2.13.0's
// torch.utils.data.distributed.
TEST(DistributedSampler, GivesPythonsIndices) {
  EXPECT_EQ(DistributedSampler(10, part(0, 3)).indices(),
            (Indices{4, 5, 0, 2}));
  EXPECT_EQ(DistributedSampler(10, part(2, 3)).indices(),
            (Indices{7, 9, 6, 1}));

  DistributedSampler seeded(10, {.num_replicas = 3, .rank = 1, .seed = 7});
  seeded.set_epoch(5);
  EXPECT_EQ(seeded.indices(), (Indices{5, 0, 2, 3}));

  DistributedSampler dropping(
      10, {.num_replicas = 3, .rank = 1, .seed = 7, .drop_last = true});
  dropping.set_epoch(5);
  EXPECT_EQ(dropping.indices(), (Indices{5, 0, 2}));

  // There are more ranks than samples, so padding repeats them more than once.
  EXPECT_EQ(
      DistributedSampler(2, {.num_replicas = 5, .rank = 4, .shuffle = false})
          .indices(),
      (Indices{0}));
  EXPECT_EQ(DistributedSampler(2, part(3, 5)).indices(), (Indices{1}));

  DistributedSampler negative(10, {.num_replicas = 1, .rank = 0, .seed = -3});
  negative.set_epoch(1);
  EXPECT_EQ(negative.indices(), (Indices{0, 1, 3, 5, 7, 9, 8, 6, 4, 2}));
}

TEST(DistributedSampler, AloneItVisitsEverything) {
  DistributedSampler sampler(5, {.shuffle = false});
  EXPECT_EQ(sampler.num_replicas(), 1);
  EXPECT_EQ(sampler.indices(), (Indices{0, 1, 2, 3, 4}));
  DistributedSampler empty(0);
  EXPECT_EQ(empty.size(), 0);
  EXPECT_TRUE(empty.indices().empty());
}

TEST(DistributedSampler, SetEpochChangesTheOrder) {
  DistributedSampler sampler(100, part(0, 2));
  Indices first = sampler.begin_pass();
  EXPECT_EQ(sampler.begin_pass(), first) << "the same epoch, the same order";
  sampler.set_epoch(1);
  EXPECT_NE(sampler.begin_pass(), first);
  sampler.set_epoch(0);
  EXPECT_EQ(sampler.begin_pass(), first);
}

TEST(DistributedSampler, WithoutPaddingEachSampleIsVisitedOnce) {
  for (int64_t size : {0, 1, 2, 3, 7, 10, 100, 1797}) {
    Indices expected(size);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = i;
    for (int64_t ranks = 1; ranks <= 8; ++ranks) {
      for (bool shuffle : {false, true}) {
        EXPECT_EQ(
            visited_by_all({.shuffle = shuffle, .pad = false}, size, ranks),
            expected)
            << size << " samples, " << ranks << " ranks";
      }
    }
  }
  DistributedSampler longer(7, {.num_replicas = 3, .rank = 0, .pad = false});
  DistributedSampler shorter(7, {.num_replicas = 3, .rank = 2, .pad = false});
  EXPECT_EQ(longer.size(), 3);
  EXPECT_EQ(shorter.size(), 2);
}

TEST(DistributedSampler, PositionIsTheSameOnAllRanks) {
  for (bool pad : {true, false}) {
    DistributedSampler first(11, {.num_replicas = 3, .rank = 0, .pad = pad});
    DistributedSampler last(11, {.num_replicas = 3, .rank = 2, .pad = pad});
    first.begin_pass();
    last.begin_pass();
    for (int batch = 0; batch < 2; ++batch) {
      first.consumed(2);
      last.consumed(2);
      EXPECT_EQ(first.state_dict(), last.state_dict());
    }
    EXPECT_EQ(first.position(), pad ? 12 : 11);
  }
}

// For every batch size and position: a sampler that gets only the state
// continues like the run itself.
TEST(DistributedSampler, ResumesAtEveryPosition) {
  for (bool drop_last : {false, true}) {
    for (int64_t batch : {1, 2, 3}) {
      DistributedSamplerOptions options{
          .num_replicas = 3, .rank = 1, .seed = 4, .drop_last = drop_last};
      DistributedSampler run(20, options);
      run.set_epoch(6);
      Indices whole = run.begin_pass();
      for (size_t done = 0;; done += batch) {
        options.seed = 0;  // the state restores it
        DistributedSampler resumed(20, options);
        resumed.load_state_dict(run.state_dict());
        resumed.set_epoch(6);  // like the training loop
        EXPECT_EQ(resumed.position(), run.position());
        size_t skipped = std::min(done, whole.size());
        EXPECT_EQ(resumed.begin_pass(),
                  Indices(whole.begin() + skipped, whole.end()));
        if (done >= whole.size()) break;
        run.consumed(batch);
      }
    }
  }
}

TEST(DistributedSampler, AResumedPassIsFollowedByAWholeOne) {
  DistributedSampler run(8, part(0, 2));
  run.begin_pass();
  run.consumed(3);
  DistributedSampler resumed(8, part(0, 2));
  resumed.load_state_dict(run.state_dict());
  EXPECT_EQ(resumed.begin_pass().size(), 1u);
  EXPECT_EQ(resumed.begin_pass(), resumed.indices());

  resumed.load_state_dict(run.state_dict());
  resumed.set_epoch(1);
  EXPECT_EQ(resumed.position(), 0);
  EXPECT_EQ(resumed.begin_pass(), resumed.indices());
}

TEST(DistributedSampler, TheRestOfAnEpochCanBeSharedByOtherRanks) {
  DistributedSampler before(
      21, {.num_replicas = 4, .rank = 0, .seed = 1, .pad = false});
  before.begin_pass();
  before.consumed(2);
  DistributedSampler alone(
      21, {.num_replicas = 1, .rank = 0, .seed = 1, .pad = false});
  Indices order = alone.indices();
  Indices rest(order.begin() + 8, order.end());
  std::ranges::sort(rest);
  Indices together;
  for (int64_t rank = 0; rank < 3; ++rank) {
    DistributedSampler after(21,
                             {.num_replicas = 3, .rank = rank, .pad = false});
    after.load_state_dict(before.state_dict());
    Indices mine = after.begin_pass();
    together.insert(together.end(), mine.begin(), mine.end());
  }
  std::ranges::sort(together);
  EXPECT_EQ(together, rest);
}

// Regression: 4 ranks had made an epoch of 11 samples with drop_last, and 1
// rank that loaded the state made the 3 samples that had been left out.
TEST(DistributedSampler, AFinishedEpochIsOverForAnyNumberOfRanks) {
  DistributedSampler run(11, {.num_replicas = 4, .rank = 0, .drop_last = true});
  run.begin_pass();
  run.consumed(1);
  EXPECT_EQ(run.position(), 4);
  run.consumed(1);
  EXPECT_EQ(run.position(), 11);
  DistributedSampler alone(11, part(0, 1));
  alone.load_state_dict(run.state_dict());
  EXPECT_TRUE(alone.begin_pass().empty());

  // The same if the loader leaves out the last batch.
  DistributedSampler padded(11, part(0, 4));
  padded.begin_pass();
  padded.consumed(2);
  EXPECT_EQ(padded.position(), 8);
  padded.rest_left_out();
  alone.load_state_dict(padded.state_dict());
  EXPECT_TRUE(alone.begin_pass().empty());

  // And if the ranks had nothing to do at all.
  DistributedSampler many(3, {.num_replicas = 4, .rank = 0, .drop_last = true});
  EXPECT_TRUE(many.begin_pass().empty());
  DistributedSampler few(3, part(0, 1));
  few.load_state_dict(many.state_dict());
  EXPECT_TRUE(few.begin_pass().empty());
}

// Fewer samples than ranks, as in Python: padding repeats them, drop_last
// leaves nothing.
TEST(DistributedSampler, FewerSamplesThanRanks) {
  for (int64_t size : {0, 1, 2}) {
    for (int64_t rank = 0; rank < 3; ++rank) {
      DistributedSampler padded(
          size, {.num_replicas = 3, .rank = rank, .shuffle = false});
      EXPECT_EQ(
          padded.indices(),
          size == 0 ? Indices{} : Indices{static_cast<size_t>(rank % size)});
      DistributedSampler dropping(
          size, {.num_replicas = 3, .rank = rank, .drop_last = true});
      EXPECT_EQ(dropping.size(), 0);
      EXPECT_TRUE(dropping.begin_pass().empty());
      DistributedSampler once(
          size,
          {.num_replicas = 3, .rank = rank, .shuffle = false, .pad = false});
      EXPECT_EQ(once.size(), rank < size ? 1 : 0);
    }
  }
}

// The position became negative, and the state could not be loaded.
TEST(DistributedSampler, ABatchMayHoldEverySample) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const int64_t size : {kHuge, kHuge / 2, kHuge / 3 + 1}) {
    DistributedSampler sampler(10, part(1, 3));
    sampler.begin_pass();
    sampler.consumed(size);
    EXPECT_EQ(sampler.position(), 12);
    DistributedSampler other(10, part(1, 3));
    other.load_state_dict(sampler.state_dict());
    EXPECT_TRUE(other.begin_pass().empty());
    BatchSampler batches(other, size);
    EXPECT_EQ(batches.size(), 1);
    EXPECT_EQ(batches.begin_pass().ends, std::vector<size_t>{4});
    EXPECT_EQ(BatchSampler(other, size, /*drop_last=*/true).size(), 0);
  }
}

TEST(DistributedSampler, RefusesBadArguments) {
  EXPECT_THAT([] { DistributedSampler(-1); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("dataset size is -1; it must be 0 or more")));
  EXPECT_THAT([] { DistributedSampler(5, part(0, 0)); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("num_replicas is 0; it must be 1 or more")));
  for (int64_t rank : {-1, 2, 3}) {
    EXPECT_THAT([&] { DistributedSampler(5, part(rank, 2)); },
                ThrowsMessage<std::invalid_argument>(
                    AllOf(HasSubstr("rank is " + std::to_string(rank)),
                          HasSubstr("in [0, 1]"))));
  }
}

TEST(DistributedSampler, RefusesToGuessInALaunchedProcessWithoutAGroup) {
  setenv("WORLD_SIZE", "2", 1);
  EXPECT_THAT([] { DistributedSampler(5); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("call init_process_group() first")));
  EXPECT_NO_THROW(DistributedSampler(5, part(1, 2)));
  unsetenv("WORLD_SIZE");
}

// TrainingState::sampler_state is empty if the snapshot was saved between two
// epochs.
TEST(DistributedSampler, AnEmptyStateIsTheBeginningOfTheNextEpoch) {
  DistributedSampler sampler(10, {.seed = 3});
  DistributedSampler other(10, {.seed = 3});
  sampler.load_state_dict({});
  sampler.set_epoch(2);
  other.set_epoch(2);
  EXPECT_EQ(sampler.begin_pass(), other.begin_pass());
}

TEST(DistributedSampler, RefusesAForeignStateAndKeepsItsOwn) {
  DistributedSampler sampler(10, part(0, 2));
  sampler.begin_pass();
  sampler.consumed(1);
  const auto state = sampler.state_dict();
  auto refuses = [&](auto change, const char* message) {
    auto bad = state;
    change(bad);
    EXPECT_THAT([&] { sampler.load_state_dict(bad); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(message)));
    EXPECT_EQ(sampler.state_dict(), state);
  };
  refuses([](auto& s) { s.erase("seed"); }, "no entry \"seed\"");
  refuses([](auto& s) { s["dataset_size"] = 11; },
          "a dataset of 11 samples, but this dataset has 10");
  refuses([](auto& s) { s["shuffle"] = 0; }, "shuffle = false");
  refuses([](auto& s) { s["position"] = -2; }, "position is -2");
  refuses([](auto& s) { s["position"] = INT64_MAX; }, "damaged");
}

}  // namespace
}  // namespace lockstep::internal
