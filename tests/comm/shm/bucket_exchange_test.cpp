// Buckets that are reduced repeatedly: every bit is checked, and ranks are
// late, leave or disagree.
#include "lockstep/comm/shm/protocol/bucket_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/protocol/common_memory.h"
#include "tests/comm/shm/bucket_rounds.h"
#include "tests/comm/shm/protocol_world.h"
#include "tests/harness/asleep.h"

namespace lockstep::internal::shm::testing {
namespace {

using internal::testing::await_asleep;
using std::chrono::microseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr milliseconds kEndless{600'000};
constexpr milliseconds kShort{300};
constexpr seconds kTestTime{60};
constexpr size_t kLargest = size_t{1} << 19;

const Values& values() {
  static const Values all(20'261'121, kLargest);
  return all;
}

// Odd and small sizes, one piece of 16 KiB and its neighbours, large sizes, and
// zero.
std::vector<BucketShape> shapes(DType dtype) {
  const size_t piece = (size_t{16} << 10) / kernels::size_of(dtype);
  std::vector<BucketShape> all;
  for (const size_t count :
       {size_t{1}, size_t{7}, size_t{0}, size_t{33}, size_t{1000}, piece,
        2 * piece + 3, 5 * piece - 1, kLargest / kernels::size_of(dtype)}) {
    all.push_back({.count = count, .dtype = dtype});
  }
  return all;
}

constexpr DType kFloating[] = {DType::float32, DType::float64, DType::float16,
                               DType::bfloat16};

void dawdle(const Group& group, uint64_t step) {
  const auto chance = mixed(step, group.rank(), 5);
  if (chance % 4 == 0) sleep_for(microseconds(chance / 8 % 400));
}

class Buckets : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Buckets, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(Buckets, HoldTheSumOfAllRanksBitByBit) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    for (const auto dtype : kFloating) {
      for (const auto results : {Results::everywhere, Results::owned}) {
        for (const bool uneven : {false, true}) {
          BucketRank rank(group, values(),
                          {.buckets = shapes(dtype),
                           .results = results,
                           .uneven_owners = uneven});
          for (uint64_t step = 0; step < 4; ++step) {
            rank.run(step, [&] { dawdle(group, step); });
          }
        }
      }
    }
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST_P(Buckets, ArePartlyReducedWhereEachRankHasThem) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    for (const auto dtype : kFloating) {
      for (const auto results : {Results::everywhere, Results::owned}) {
        for (const bool uneven : {false, true}) {
          BucketRank rank(group, values(),
                          {.buckets = {{.count = 7, .dtype = dtype},
                                       {.count = 3000, .dtype = dtype},
                                       {.count = 0, .dtype = dtype},
                                       {.count = 30'001, .dtype = dtype}},
                           .results = results,
                           .uneven_owners = uneven,
                           .moving = true});
          for (uint64_t step = 0; step < 5; ++step) {
            rank.run(step, [&] { dawdle(group, step); });
          }
        }
      }
    }
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

// Such buckets were not reduced.
TEST_P(Buckets, OfWhichAllRangesAreEmptyAreDividedEqually) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    for (const auto results : {Results::everywhere, Results::owned}) {
      BucketRank rank(group, values(),
                      {.buckets = {{.count = 40'000}, {.count = 5}},
                       .results = results,
                       .empty_ranges = true});
      for (uint64_t step = 0; step < 3; ++step) rank.run(step);
    }
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST_P(Buckets, AreDividedByAnyDivisor) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    for (const auto dtype : kFloating) {
      for (const double divisor : {1.0, 3.5, 7.0}) {
        for (const auto results : {Results::everywhere, Results::owned}) {
          BucketRank rank(group, values(),
                          {.buckets = {{.count = 999, .dtype = dtype},
                                       {.count = 20'001, .dtype = dtype}},
                           .results = results,
                           .divisor = divisor});
          for (uint64_t step = 0; step < 3; ++step) rank.run(step);
        }
      }
    }
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST_P(Buckets, OfSeveralExchangesInterleaveWithCollectives) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    BucketRank one(group, values(),
                   {.buckets = {{.count = 5000}, {.count = 17}}});
    BucketRank other(group, values(),
                     {.buckets = {{.count = 300, .dtype = DType::bfloat16},
                                  {.count = 9, .dtype = DType::float64},
                                  {.count = 40'000}},
                      .results = Results::owned,
                      .uneven_owners = true});
    std::vector<std::byte> room(kLargest);
    Caller caller(group, values(), kEndless);
    for (uint64_t step = 0; step < 60; ++step) {
      one.run(step, [&] {
        caller.run({.operation = Operation::all_reduce,
                    .count = mixed(step) % 3000,
                    .step = step},
                   room.data());
      });
      dawdle(group, step);
      other.run(step);
      if (step % 10 == 0) {
        BucketRank brief(group, values(), {.buckets = {{.count = 77}}});
        brief.run(step);
      }
    }
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST_P(Buckets, OfAnAbandonedRoundDoNotDisturbTheNext) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    for (const auto results : {Results::everywhere, Results::owned}) {
      BucketRank rank(group, values(),
                      {.buckets = {{.count = 30'000},
                                   {.count = 5},
                                   {.count = 100'000},
                                   {.count = 64}},
                       .results = results});
      for (uint64_t step = 0; step < 60; ++step) {
        // Sometimes abandons two reductions, each rank after any number of
        // buckets.
        for (uint64_t times = mixed(step) % 3; times > 0; --times) {
          rank.abandon(1000 + step, mixed(step, group.rank(), times) % 4);
          dawdle(group, step);
        }
        rank.run(step);
      }
    }
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST_P(Buckets, OfMoreRoundsThanAnybodyCounts) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    BucketRank rank(group, values(),
                    {.buckets = {{.count = 3}, {.count = 60}}});
    for (uint64_t step = 0; step < 1500; ++step) rank.run(step);
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST_P(Buckets, NoneAtAllIsARoundToo) {
  ThreadWorld world(GetParam(), small_tuning());
  const auto ends = world.run([](Group& group) {
    BucketRank rank(group, values(), {.buckets = {}});
    rank.run(0);
    rank.run(1);
  });
  EXPECT_EQ(faults(ends), "");
}

// Returns the error of make() if rank 1 passes other buckets than the rest.
std::string mismatch_of(const std::vector<Bucket>& most,
                        const std::vector<Bucket>& of_one,
                        Results results_of_one = Results::everywhere) {
  ThreadWorld world(3, small_tuning());
  std::vector<std::string> words(3);
  const auto ends = world.run([&](Group& group) {
    const bool odd = group.rank() == 1;
    auto buckets = odd ? of_one : most;
    std::vector<void*> memory;
    for (auto& bucket : buckets) {
      memory.push_back(group.allocate_registered(4096));
      bucket.data = memory.back();
    }
    const End end = end_of([&] {
      BucketExchange::make(
          group, buckets, odd ? results_of_one : Results::everywhere, kEndless);
    });
    words[group.rank()] = end.words;
    for (auto* one : memory) group.free_registered(one);
    if (end.kind != End::Kind::mismatch) {
      throw std::runtime_error("no mismatch: " + end.words);
    }
    group.barrier(kEndless);  // the group still works
  });
  EXPECT_EQ(faults(ends), "");
  EXPECT_EQ(words[0], words[1]);
  EXPECT_EQ(words[0], words[2]);
  return words[0];
}

Bucket of(size_t count, DType dtype = DType::float32,
          std::vector<Range> owned = {}) {
  return {.data = nullptr,
          .count = count,
          .dtype = dtype,
          .owned = std::move(owned)};
}

TEST(BucketLayouts, ThatDifferAreNamedOnAllRanks) {
  EXPECT_THAT(mismatch_of({of(3), of(5)}, {of(3), of(6)}),
              AllOf(HasSubstr("rank 0: bucket 2 of 2 holds 5 Float"),
                    HasSubstr("rank 1: bucket 2 of 2 holds 6 Float")));
  EXPECT_THAT(mismatch_of({of(3)}, {of(3, DType::bfloat16)}),
              AllOf(HasSubstr("3 Float"), HasSubstr("3 BFloat16")));
  EXPECT_THAT(
      mismatch_of({of(3), of(5)}, {of(3)}),
      AllOf(HasSubstr("rank 0: 2 buckets"), HasSubstr("rank 1: 1 buckets")));
  EXPECT_THAT(mismatch_of({of(3)}, {of(3)}, Results::owned),
              AllOf(HasSubstr("results everywhere"),
                    HasSubstr("results where they are owned")));
}

TEST(BucketLayouts, WhoseOwnersAreWrongAreNamedOnAllRanks) {
  auto owning = [](int64_t begin, int64_t end) {
    return std::vector<Bucket>{
        of(10, DType::float32, {{.begin = begin, .end = end}})};
  };
  EXPECT_THAT(mismatch_of({of(10)}, owning(0, 9)),
              HasSubstr("no rank owns element 9 of bucket 1 of 1"));
  EXPECT_THAT(mismatch_of({of(10)}, owning(2, 10)),
              HasSubstr("no rank owns element 0"));
  EXPECT_THAT(mismatch_of(owning(0, 5), owning(5, 10)),
              HasSubstr("two ranks own element 0"));
  EXPECT_THAT(mismatch_of({of(10)}, owning(5, 11)),
              HasSubstr("rank 1 owns elements 5 to 11"));
  EXPECT_THAT(mismatch_of({of(10)}, owning(-5, 10)),
              HasSubstr("rank 1 owns elements -5 to 10"));
}

TEST(BucketLayouts, CallOfSomethingElseIsNamed) {
  ThreadWorld world(2, small_tuning());
  const auto ends = world.run([](Group& group) {
    if (group.rank() == 0) {
      group.barrier(kEndless);
    } else {
      BucketExchange::make(group, {}, Results::everywhere, kEndless);
    }
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.kind, End::Kind::mismatch) << end;
    EXPECT_THAT(end.words, AllOf(HasSubstr("rank 0: barrier"),
                                 HasSubstr("rank 1: reduce_buckets")));
  }
}

TEST(BucketLayouts, OrdinaryMemoryOfOneRankIsNoOnAllRanks) {
  ForkedWorld world(3, small_tuning(), [](Group& group, Signs&) {
    std::vector<float> ordinary(100);
    auto* registered = group.allocate_registered(400);
    const auto made = BucketExchange::make(
        group,
        {{.data = group.rank() == 2 ? ordinary.data() : registered,
          .count = 100,
          .dtype = DType::float32}},
        Results::everywhere, kEndless);
    group.free_registered(registered);
    if (made) throw std::runtime_error("it was made");
    BucketRank rank(group, values(), {.buckets = {{.count = 100}}});
    rank.run(0);
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST(BucketCalls, InAWrongOrderAreMistakes) {
  ThreadWorld world(1, small_tuning());
  const auto ends = world.run([](Group& group) {
    BucketRank rank(group, values(), {.buckets = {{.count = 3}, {.count = 4}}});
    auto& exchange = rank.exchange();
    EXPECT_THROW(exchange.publish(0), std::logic_error);
    EXPECT_THROW(exchange.finish(), std::logic_error);
    EXPECT_THROW(exchange.begin(1, 0), std::invalid_argument);
    exchange.begin(1, 1);
    EXPECT_THROW(exchange.publish(1), std::logic_error);
    exchange.publish(0);
    EXPECT_THROW(exchange.publish(0), std::logic_error);
    EXPECT_THROW(exchange.finish(), std::logic_error);
    exchange.publish(1);
    exchange.finish();
    EXPECT_THROW(exchange.publish(0), std::logic_error);
  });
  EXPECT_EQ(faults(ends), "");
}

TEST(BucketFaults, BucketThatIsNotPublishedIsNamedWithItsRank) {
  ThreadWorld world(3, small_tuning());
  const auto ends = world.run([](Group& group) {
    BucketRank rank(group, values(),
                    {.buckets = {{.count = 3}, {.count = 400}, {.count = 5}},
                     .timeout = kShort});
    rank.run(0);
    float data = 1;
    group.all_reduce(&data, 1, DType::float32, ReduceOp::sum, kEndless);
    if (group.rank() == 1) {
      rank.abandon(1, 1);
    } else {
      rank.run(1);
    }
  });
  EXPECT_EQ(ends[1].kind, End::Kind::well) << ends[1];
  for (int rank : {0, 2}) {
    EXPECT_EQ(ends[rank].kind, End::Kind::broken) << ends[rank];
    EXPECT_THAT(
        ends[rank].words,
        AllOf(
            HasSubstr("rank 1 has not published bucket 2 of 3 of reduction 2"),
            HasSubstr("the last collective that it announced was all_reduce #"),
            HasSubstr("allowed 300 ms")));
  }
}

TEST(BucketFaults, RankThatDoesNotReduceItsPartIsNamed) {
  for (const auto results : {Results::everywhere, Results::owned}) {
    ThreadWorld world(2, small_tuning());
    const auto ends = world.run([&](Group& group) {
      BucketRank rank(group, values(),
                      {.buckets = {{.count = 3}, {.count = 400}},
                       .results = results,
                       .timeout = kShort});
      auto& exchange = rank.exchange();
      exchange.begin(1, 2);
      exchange.publish(0);
      exchange.publish(1);
      if (group.rank() == 0) return;
      exchange.finish();
      exchange.begin(1, 2);
    });
    EXPECT_EQ(ends[1].kind, End::Kind::broken) << ends[1];
    EXPECT_THAT(ends[1].words, HasSubstr("rank 0 has not reduced its part of"));
    EXPECT_THAT(ends[1].words, HasSubstr("of reduction 1"));
  }
}

// Returns the words of the CallMismatch that `call` throws; empty if it throws
// none.
std::string mismatch_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CallMismatch& error) {
    return error.what();
  }
  return {};
}

// Regression: gradients of two iterations were added up if one rank was a
// backward ahead.
TEST(BucketFaults, RanksOfDifferentIterationsAreToldBoth) {
  for (const size_t count : {3, 100'000}) {  // staged, and in place
    ThreadWorld world(3, default_tuning(3));
    const auto ends = world.run([&](Group& group) {
      BucketRank rank(group, values(),
                      {.buckets = {{.count = count}}, .timeout = kEndless});
      auto& exchange = rank.exchange();
      rank.run(1);
      EXPECT_THAT(mismatch_of([&] {
                    exchange.begin(group.rank() == 1 ? 3 : 2, 3);
                    exchange.publish(0);
                    exchange.finish();
                  }),
                  AllOf(HasSubstr("rank 1 number 3"), HasSubstr("number 2")));
      rank.run(4);  // the group still works
    });
    for (const auto& end : ends) EXPECT_EQ(end.kind, End::Kind::well) << end;
  }
}

TEST(BucketFaults, RanksThatWaitForAnAbandonedRoundAreToldAtOnce) {
  for (const auto results : {Results::everywhere, Results::owned}) {
    for (const size_t publishes : {0, 1, 2}) {
      ThreadWorld world(3, default_tuning(3));
      const auto ends = world.run([&](Group& group) {
        BucketRank rank(group, values(),
                        {.buckets = {{.count = 3}, {.count = 100'000}},
                         .results = results,
                         .timeout = kEndless});
        auto& exchange = rank.exchange();
        rank.run(1);
        if (group.rank() == 2) {
          exchange.begin(2, 3);
          for (size_t i = 0; i < publishes; ++i) exchange.publish(i);
          exchange.abandon();
          EXPECT_THROW(exchange.finish(), std::logic_error);
        } else {
          exchange.begin(2, 3);
          exchange.publish(0);
          exchange.publish(1);
          EXPECT_THAT(mismatch_of([&] { exchange.finish(); }),
                      HasSubstr("rank 2 has given up iteration 2"));
        }
        rank.run(3);  // the group still works
      });
      for (const auto& end : ends) EXPECT_EQ(end.kind, End::Kind::well) << end;
    }
  }
}

TEST(BucketFaults, RankThatGivesUpBecauseTheGroupIsBrokenSaysThat) {
  ThreadWorld world(3, default_tuning(3));
  std::atomic<bool> given_up{false};
  const auto ends = world.run([&](Group& group) {
    BucketRank rank(group, values(),
                    {.buckets = {{.count = 3}}, .timeout = kEndless});
    auto& exchange = rank.exchange();
    rank.run(1);
    exchange.begin(2, 3);
    if (group.rank() == 1) {
      group.hang_up("the disk is full");
      exchange.abandon();
      given_up = true;
      return;
    }
    exchange.publish(0);
    while (!given_up) std::this_thread::yield();
    EXPECT_THAT([&] { exchange.finish(); },
                ::testing::ThrowsMessage<GroupBroken>(
                    AllOf(HasSubstr("rank 1"), HasSubstr("the disk is full"))));
  });
}

// A rank that has done its part cannot stop the others from finishing.
// Regression: its next reduction was taken for theirs, so it stayed one step
// apart for ever.
TEST(BucketFaults, RankThatGivesUpWhatTheOthersFinishIsTold) {
  for (const auto results : {Results::everywhere, Results::owned}) {
    for (const size_t count : {3, 100'000}) {  // staged, and in place
      ThreadWorld world(3, default_tuning(3));
      const auto ends = world.run([&](Group& group) {
        BucketRank rank(group, values(),
                        {.buckets = {{.count = count}},
                         .results = results,
                         .timeout = kEndless});
        auto& exchange = rank.exchange();
        rank.run(1);
        if (group.rank() == 1) {
          exchange.begin(2, 3);
          exchange.publish(0);
          while (exchange.advance() == 0) std::this_thread::yield();
          exchange.abandon();
          EXPECT_THAT(mismatch_of([&] { exchange.reclaim(); }),
                      AllOf(HasSubstr("rank 1 has given up iteration 2"),
                            HasSubstr("has finished it")));
        } else {
          exchange.begin(2, 3);
          exchange.publish(0);
          exchange.finish();
        }
        rank.run(3);  // the group still works
        // All ranks give up a reduction that all could have finished.
        exchange.begin(4, 3);
        exchange.publish(0);
        while (exchange.advance() == 0) std::this_thread::yield();
        exchange.abandon();
        rank.run(5);
      });
      for (const auto& end : ends) EXPECT_EQ(end.kind, End::Kind::well) << end;
    }
  }
}

TEST(BucketFaults, RoundThatOneRankAloneAbandonedIsNamed) {
  ThreadWorld world(2, small_tuning());
  const auto ends = world.run([](Group& group) {
    BucketRank rank(group, values(),
                    {.buckets = {{.count = 3}}, .timeout = kShort});
    rank.exchange().begin(1, 2);
    if (group.rank() == 1) rank.exchange().begin(1, 2);
  });
  EXPECT_EQ(ends[1].kind, End::Kind::broken) << ends[1];
  EXPECT_THAT(
      ends[1].words,
      HasSubstr("rank 0 has neither finished nor given up reduction 1"));
}

TEST(BucketFaults, KilledRankIsNamedByWhoWaitsInFinish) {
  for (const auto results : {Results::everywhere, Results::owned}) {
    for (int victim : {0, 2}) {
      ForkedWorld world(3, default_tuning(3), [&](Group& group, Signs& signs) {
        BucketRank rank(group, values(),
                        {.buckets = {{.count = 3}, {.count = 100'000}},
                         .results = results,
                         .timeout = kEndless});
        for (uint64_t step = 1;; ++step) {
          rank.run(step);
          signs.steps[group.rank()].store(step);
        }
      });
      ASSERT_TRUE(world.await_steps(3));
      world.signal(victim, SIGKILL);
      const auto ends = world.finish(seconds(10));
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(ends[rank].kind,
                  rank == victim ? End::Kind::killed : End::Kind::broken)
            << ends[rank];
        if (rank == victim) continue;
        EXPECT_THAT(ends[rank].words,
                    HasSubstr("rank " + std::to_string(victim)));
      }
    }
  }
}

TEST(BucketFaults, GroupThatIsHungUpFailsTheRoundOfAnotherThread) {
  ThreadWorld world(2, small_tuning());
  std::atomic<pid_t> waiting{0};
  const auto ends = world.run([&](Group& group) {
    BucketRank rank(group, values(),
                    {.buckets = {{.count = 3}}, .timeout = kEndless});
    if (group.rank() == 0) {
      waiting = ::gettid();
      rank.run(0);
    } else {
      EXPECT_TRUE(await_asleep(waiting));
      world.group(0).hang_up("told to stop");
    }
  });
  EXPECT_EQ(ends[0].kind, End::Kind::broken);
  EXPECT_THAT(ends[0].words, HasSubstr("told to stop"));
}

TEST_P(Buckets, MemoryInCommonIsOneForAll) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    for (int repeated = 0; repeated < 3; ++repeated) {
      CommonMemory memory(group, 10'000, kEndless);
      const int size = group.size();
      auto* numbers = reinterpret_cast<int*>(memory.data());
      for (int i = 0; i < 2'500; ++i) {
        if (i % size == group.rank() && numbers[i]++ != 0) {
          throw std::runtime_error("it did not begin as zeros");
        }
      }
      group.barrier(kEndless);
      if (std::accumulate(numbers, numbers + 2'500, 0) != 2'500) {
        throw std::runtime_error("the others wrote elsewhere");
      }
      group.barrier(kEndless);
    }
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST(CommonMemoryOfRanks, ThatAskForDifferentSizesIsAMismatch) {
  ThreadWorld world(2, small_tuning());
  const auto ends = world.run([](Group& group) {
    CommonMemory(group, group.rank() == 0 ? 100 : 200, kEndless);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.kind, End::Kind::mismatch) << end;
    EXPECT_THAT(end.words, AllOf(HasSubstr("memory_in_common"),
                                 HasSubstr("100"), HasSubstr("200")));
  }
}

TEST(CommonMemoryOfRanks, ThatThereIsNotEnoughOfIsUnavailableOnAllRanks) {
  ThreadWorld world(2, small_tuning());
  const auto ends = world.run([](Group& group) {
    EXPECT_THROW(CommonMemory(group, size_t{1} << 50, kEndless), Unavailable);
    CommonMemory(group, 100, kEndless);
  });
  EXPECT_EQ(faults(ends), "");
}

// A bug: a rank that gave up after its part was reduced ended the wait of
// another one for the third, which still read the contributions of that one.
TEST(BucketExchanges, ARankThatGivesUpEndsNoWaitForOthers) {
  constexpr int kSteps = 4000;
  constexpr size_t kCount = 300;
  ForkedWorld world(3, small_tuning(), [](Group& group, Signs&) {
    auto* data = static_cast<float*>(group.allocate_registered(4096));
    group.barrier(kEndless);
    auto exchange = BucketExchange::make(
        group, {{.data = data, .count = kCount, .dtype = DType::float32}},
        Results::owned, kEndless);
    for (int step = 0; step < kSteps; ++step) {
      std::fill_n(data, kCount, 1.0F);
      exchange->begin(step, 1);
      exchange->publish(0);
      if (group.rank() == 0) {
        exchange->finish();
        std::fill_n(data, kCount, 1000.0F);  // the next iteration's
      } else if (group.rank() == 1) {
        const auto until = std::chrono::steady_clock::now() +
                           microseconds(mixed(step, 1, 5) % 40);
        while (std::chrono::steady_clock::now() < until) {
        }
        while (exchange->advance() < 1) {
        }
        exchange->abandon();
        try {
          exchange->reclaim();
        } catch (const CallMismatch&) {
          // A peer had all that it needed.
        }
      } else {
        sleep_for(microseconds(150));
        while (exchange->advance() < 1) {
        }
        // This rank's third of the sums; the others are its own ones.
        if (std::any_of(data, data + kCount,
                        [](float value) { return value != 3 && value != 1; })) {
          throw std::runtime_error("a sum has parts of the next iteration");
        }
        exchange->finish();
      }
      group.barrier(kEndless);
    }
    exchange.reset();
    group.free_registered(data);
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST_P(Buckets, SplitBarrierSeparatesWhatLiesBeforeFromWhatLiesBehind) {
  ForkedWorld world(GetParam(), small_tuning(), [](Group& group, Signs&) {
    const int size = group.size();
    CommonMemory memory(group, size_t{2} * size * 8, kEndless);
    Arrivals barrier(group, kEndless);
    barrier.wait(kEndless);  // no arrival to wait for yet
    auto* numbers = reinterpret_cast<uint64_t*>(memory.data());
    for (uint64_t step = 1; step < 1500; ++step) {
      numbers[step % 2 * size + group.rank()] = step;
      barrier.arrive();
      if (step % 50 == 0) dawdle(group, step);
      barrier.wait(kEndless);
      barrier.wait(kEndless);  // returns at once
      for (int peer = 0; peer < size; ++peer) {
        if (numbers[step % 2 * size + peer] != step) {
          throw std::runtime_error("an arrival was not waited for");
        }
      }
    }
  });
  EXPECT_EQ(faults(world.finish(kTestTime)), "");
}

TEST(SplitBarriers, NameWhoDoesNotArrive) {
  ThreadWorld world(3, small_tuning());
  const auto ends = world.run([](Group& group) {
    Arrivals barrier(group, kEndless);
    for (int i = 0; i < 3; ++i) {
      if (i == 2 && group.rank() == 2) return;
      barrier.arrive();
      barrier.wait(kShort);
    }
  });
  for (int rank : {0, 1}) {
    EXPECT_EQ(ends[rank].kind, End::Kind::broken) << ends[rank];
    EXPECT_THAT(ends[rank].words, HasSubstr("rank 2 has arrived 2 of 3 times"));
  }
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
