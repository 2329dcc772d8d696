// Reductions of buckets with ranks as threads, under ThreadSanitizer: a part of
// the program of protocol_races.cpp.
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "lockstep/comm/shm/protocol/common_memory.h"
#include "tests/comm/shm/bucket_rounds.h"
#include "tests/comm/shm/protocol_world.h"

namespace lockstep::internal::shm::testing {
namespace {

constexpr milliseconds kTimeout{50'000};

const Values& values() {
  static const Values all(20'261'123, 40'000);
  return all;
}

void dawdle(const Group& group, uint64_t step) {
  const auto chance = mixed(step, group.rank(), 11);
  if (chance % 8 == 0) sleep_for(std::chrono::microseconds(chance / 8 % 300));
}

class BucketRaces : public ::testing::TestWithParam<int> {
 protected:
  ThreadWorld world_{GetParam(), small_tuning()};
};
INSTANTIATE_TEST_SUITE_P(Ranks, BucketRaces, ::testing::Values(2, 3, 4));

TEST_P(BucketRaces, OfRoundsBesideCollectives) {
  const auto ends = world_.run([](Group& group) {
    for (const auto results : {Results::everywhere, Results::owned}) {
      BucketRank rank(
          group, values(),
          {.buckets = {{.count = 9000}, {.count = 3}, {.count = 500}},
           .results = results,
           .uneven_owners = results == Results::owned,
           .divisor = results == Results::owned ? 3.0 : 0});
      float number = 0;
      for (uint64_t step = 0; step < 20; ++step) {
        rank.run(step, [&] { dawdle(group, step); });
        group.all_reduce(&number, 1, DType::float32, ReduceOp::sum, kTimeout);
      }
    }
  });
  EXPECT_EQ(faults(ends), "");
}

// No rank waits for another at the end of these reductions.
TEST_P(BucketRaces, OfRoundsOfTinyBuckets) {
  const auto ends = world_.run([](Group& group) {
    BucketRank rank(group, values(),
                    {.buckets = {{.count = 5}, {.count = 40}}});
    for (uint64_t step = 0; step < 300; ++step) {
      rank.run(step, [&] { dawdle(group, step); });
      if (step % 7 == 0) rank.abandon(1000 + step, step % 3);
    }
    rank.run(300);
    group.barrier(kTimeout);
  });
  EXPECT_EQ(faults(ends), "");
}

TEST_P(BucketRaces, OfAbandonedRounds) {
  const auto ends = world_.run([](Group& group) {
    for (const auto results : {Results::everywhere, Results::owned}) {
      BucketRank rank(
          group, values(),
          {.buckets = {{.count = 9000}, {.count = 3}, {.count = 500}},
           .results = results});
      for (uint64_t step = 0; step < 20; ++step) {
        rank.abandon(100 + step, mixed(step, group.rank()) % 4);
        dawdle(group, step);
        rank.run(step);
      }
    }
  });
  EXPECT_EQ(faults(ends), "");
}

TEST_P(BucketRaces, OfASplitBarrier) {
  const auto ends = world_.run([](Group& group) {
    const int size = group.size();
    CommonMemory memory(group, size_t{2} * size * 8, kTimeout);
    Arrivals barrier(group, kTimeout);
    auto* numbers = reinterpret_cast<uint64_t*>(memory.data());
    for (uint64_t step = 1; step < 200; ++step) {
      numbers[step % 2 * size + group.rank()] = step;
      barrier.arrive();
      dawdle(group, step);
      barrier.wait(kTimeout);
      for (int peer = 0; peer < size; ++peer) {
        if (numbers[step % 2 * size + peer] != step) {
          throw std::runtime_error("an arrival was not waited for");
        }
      }
    }
    group.barrier(kTimeout);
  });
  EXPECT_EQ(faults(ends), "");
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
