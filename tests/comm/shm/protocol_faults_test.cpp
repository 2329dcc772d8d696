// Ranks that do not come, that leave, stop or die.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/comm/shm/protocol_calls.h"
#include "tests/comm/shm/protocol_world.h"
#include "tests/harness/asleep.h"

namespace lockstep::internal::shm::testing {
namespace {

using internal::testing::await_asleep;
using std::chrono::microseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr milliseconds kShort{300};
// Peers notice a dead rank long before this timeout. A rank that waits this
// long has not noticed it, and finish() reports that it hung.
constexpr milliseconds kEndless{600'000};
constexpr seconds kNoticed{10};

TEST(ShmProtocolFaults, RankThatDoesNotComeIsNamedWithItsLastCall) {
  ThreadWorld world(3, small_tuning());
  const auto ends = world.run([&](Group& group) {
    float data[3] = {1, 2, 3};
    group.barrier(kEndless);
    group.all_reduce(data, 3, DType::float32, ReduceOp::sum, kEndless);
    if (group.rank() == 1) return;
    group.barrier(kShort);
  });
  EXPECT_EQ(ends[1].kind, End::Kind::well) << ends[1];
  for (int rank : {0, 2}) {
    EXPECT_EQ(ends[rank].kind, End::Kind::broken);
    EXPECT_THAT(ends[rank].words,
                AllOf(HasSubstr("rank 1"), HasSubstr("barrier #3"),
                      HasSubstr("all_reduce #2"), HasSubstr("300 ms")));
  }
}

TEST(ShmProtocolFaults, AllRanksThatDoNotComeAreNamed) {
  ThreadWorld world(4, small_tuning());
  const auto ends = world.run([&](Group& group) {
    if (group.rank() % 2 == 1) return;
    group.barrier(kShort);
  });
  for (int rank : {0, 2}) {
    EXPECT_EQ(ends[rank].kind, End::Kind::broken);
    EXPECT_THAT(ends[rank].words,
                AllOf(HasSubstr("rank 1"), HasSubstr("rank 3"),
                      HasSubstr("called nothing yet")));
  }
}

TEST(ShmProtocolFaults, CallsOfABrokenGroupFailAtOnceOnAllRanks) {
  ThreadWorld world(3, small_tuning());
  world.run([&](Group& group) {
    if (group.rank() == 0) return;
    group.barrier(kShort);
  });
  // Rank 0 comes too late to a barrier that the others gave up. All of them had
  // entered it, so it may even end well there. kEndless: no call waits.
  world.run([&](Group& group) {
    if (group.rank() == 0) group.barrier(kEndless);
  });
  for (int repeated = 0; repeated < 2; ++repeated) {
    const auto ends = world.run([&](Group& group) {
      float data = 0;
      group.all_reduce(&data, 1, DType::float32, ReduceOp::sum, kEndless);
    });
    for (const auto& end : ends) {
      EXPECT_EQ(end.kind, End::Kind::broken) << end;
      EXPECT_THAT(end.words, HasSubstr("rank 0"));
    }
  }
}

TEST(ShmProtocolFaults, LateRankIsWaitedForUntilTheDeadline) {
  ThreadWorld world(3, small_tuning());
  const auto ends = world.run([&](Group& group) {
    // The others wait several times as long as they spin before they sleep.
    if (group.rank() == 2) sleep_for(milliseconds(400));
    group.barrier(seconds(30));
  });
  EXPECT_EQ(faults(ends), "");
}

TEST(ShmProtocolFaults, PeersSeeTheReasonOfARankThatHangsUp) {
  for (size_t count : {1, 60, 50'000}) {
    ThreadWorld world(3, small_tuning());
    std::atomic<pid_t> threads[3]{};
    const auto ends = world.run([&](Group& group) {
      std::vector<float> data(count);
      threads[group.rank()] = ::gettid();
      if (group.rank() == 1) {
        for (int rank : {0, 2}) EXPECT_TRUE(await_asleep(threads[rank]));
        group.hang_up("the reactor is on fire");
      }
      group.all_reduce(data.data(), count, DType::float32, ReduceOp::sum,
                       kEndless);
    });
    EXPECT_EQ(ends[1].kind, End::Kind::broken);
    EXPECT_THAT(ends[1].words, HasSubstr("the reactor is on fire"));
    for (int rank : {0, 2}) {
      EXPECT_EQ(ends[rank].kind, End::Kind::broken);
      EXPECT_THAT(ends[rank].words,
                  AllOf(HasSubstr("rank 1"), HasSubstr("the reactor")));
    }
  }
}

// The ranks fail one after the other, each because of the one before.
TEST(ShmProtocolFaults, RanksThatFailBecauseOfAnotherPassItsWordsOn) {
  ThreadWorld world(4, small_tuning());
  const auto ends = world.run([&](Group& group) {
    if (group.rank() == 2) return group.pass_on("rank 2 failed");
    group.barrier(kEndless);
  });
  for (int rank : {0, 1, 3}) {
    EXPECT_EQ(ends[rank].kind, End::Kind::broken);
    EXPECT_EQ(ends[rank].words, "rank 2 failed");
  }
  // Three ranks say the same by now.
  EXPECT_EQ(world.group(3).departures(), "rank 2 failed");
}

TEST(ShmProtocolFaults, ADeathIsToldInTheSameWordsByAll) {
  ForkedWorld world(4, small_tuning(), [](Group& group, Signs& signs) {
    ++signs.steps[group.rank()];
    if (group.rank() == 2) sleep_for(std::chrono::minutes(1));
    group.barrier(kEndless);
  });
  ASSERT_TRUE(world.await_steps(1));
  world.signal(2, SIGKILL);
  const auto ends = world.finish(seconds(20));
  for (int rank : {0, 1, 3}) {
    EXPECT_EQ(ends[rank].kind, End::Kind::broken);
    EXPECT_EQ(ends[rank].words, "rank 2 died");
  }
}

TEST(ShmProtocolFaults, DeparturesTellEachCauseOnce) {
  ThreadWorld world(4, small_tuning());
  world.group(0).pass_on("rank 1 failed: no luck");
  world.group(1).hang_up("no luck");
  world.group(2).pass_on("rank 1 failed: no luck; rank 0 died");
  EXPECT_EQ(world.group(3).departures(), "rank 1 failed: no luck; rank 0 died");
  ThreadWorld longest_first(4, small_tuning());
  longest_first.group(0).pass_on("rank 1 failed: no luck; rank 2 died");
  longest_first.group(1).hang_up("no luck");
  EXPECT_EQ(longest_first.group(3).departures(),
            "rank 1 failed: no luck; rank 2 died");
}

TEST(ShmProtocolFaults, HangingUpEndsThePendingCallOfAnotherThread) {
  ThreadWorld world(2, small_tuning());
  std::atomic<pid_t> waiting{0};
  const auto ends = world.run([&](Group& group) {
    if (group.rank() == 0) {
      waiting = ::gettid();
      group.barrier(kEndless);
    } else {
      EXPECT_TRUE(await_asleep(waiting));
      world.group(0).hang_up("told to stop");
    }
  });
  EXPECT_EQ(ends[0].kind, End::Kind::broken);
  EXPECT_THAT(ends[0].words, HasSubstr("told to stop"));
}

TEST(ShmProtocolFaults, VeryLongReasonIsCutNotOverflowing) {
  ThreadWorld world(2, small_tuning());
  const auto ends = world.run([&](Group& group) {
    if (group.rank() == 0) {
      group.hang_up("because " + std::string(5000, 'x'));
    } else {
      group.barrier(kEndless);
    }
  });
  EXPECT_EQ(ends[1].kind, End::Kind::broken);
  EXPECT_THAT(ends[1].words, AllOf(HasSubstr("rank 0"), HasSubstr("xxxxxxxx")));
}

TEST(ShmProtocolFaults, RankThatLeftWellIsNamedByWhoStillWaitsForIt) {
  ThreadWorld world(3, small_tuning());
  const auto ends = world.run([&](Group& group) {
    group.barrier(kEndless);
    if (group.rank() == 2) {
      world.leave(2);
    } else {
      group.barrier(kEndless);
    }
  });
  for (int rank : {0, 1}) {
    EXPECT_EQ(ends[rank].kind, End::Kind::broken);
    EXPECT_THAT(ends[rank].words, HasSubstr("rank 2"));
  }
}

// A bug: its sockets looked as if its peers had died, and it told them so.
TEST(ShmProtocolFaults, RankThatLeftBlamesNobody) {
  ThreadWorld world(3, small_tuning());
  const auto ends = world.run([&](Group& group) {
    group.barrier(kEndless);
    if (group.rank() == 2) group.leave();
    if (group.rank() != 1) group.barrier(kEndless);
  });
  EXPECT_EQ(ends[1].kind, End::Kind::well);
  EXPECT_EQ(ends[2].kind, End::Kind::broken);
  EXPECT_THAT(ends[2].words, HasSubstr("this rank has left the group"));
  EXPECT_EQ(ends[0].kind, End::Kind::broken);
  EXPECT_THAT(ends[0].words,
              AllOf(HasSubstr("rank 2 has left"), Not(HasSubstr("rank 1"))));
}

// Each rank leaves as soon as its own part is done, while others may still
// copy.
TEST(ShmProtocolFaults, RankThatLeftAfterFinishingDisturbsNobody) {
  const Values values(4, 200'000);
  for (uint64_t step = 1; step <= 120; ++step) {
    const int size = 2 + static_cast<int>(step % 3);
    ThreadWorld world(size, small_tuning());
    const Call call{.operation = static_cast<Operation>(step % kOperationCount),
                    .root = static_cast<int>(step) % size,
                    .count = mixed(step) % 20'000,
                    .step = step};
    const auto ends = world.run([&](Group& group) {
      std::vector<std::byte> room(Caller::room(call, size));
      const int rank = group.rank();
      const bool registered = mixed(step, rank) % 2 == 0;
      auto* memory =
          registered
              ? static_cast<std::byte*>(group.allocate_registered(room.size()))
              : room.data();
      Caller(group, values, kEndless).run(call, memory);
      if (registered) group.free_registered(memory);
      world.leave(rank);
    });
    ASSERT_EQ(faults(ends), "");
  }
}

// Expects, for ranks as processes, that every rank but `dead` names it.
void expect_named(const std::vector<End>& ends, int dead,
                  const std::string& name) {
  for (int rank = 0; rank < static_cast<int>(ends.size()); ++rank) {
    if (rank == dead) {
      EXPECT_EQ(ends[rank].kind, End::Kind::killed) << ends[rank];
      continue;
    }
    EXPECT_EQ(ends[rank].kind, End::Kind::broken) << ends[rank];
    EXPECT_THAT(ends[rank].words, HasSubstr(name));
  }
}

void all_reduce_for_ever(Group& group, Signs& signs, size_t bytes,
                         bool registered) {
  const Values values(7, bytes);
  const Call shape{.operation = Operation::all_reduce, .count = bytes / 4};
  const size_t needed = Caller::room(shape, group.size());
  std::vector<std::byte> room(needed);
  auto* memory =
      registered ? static_cast<std::byte*>(group.allocate_registered(needed))
                 : room.data();
  Caller caller(group, values, kEndless);
  for (uint64_t step = 1;; ++step) {
    auto call = shape;
    call.step = step;
    caller.run(call, memory);
    signs.steps[group.rank()].store(step);
  }
}

struct Killing {
  int size;
  size_t bytes;
  bool registered;
};
void PrintTo(const Killing& which, std::ostream* out) {
  *out << which.size << " ranks, " << which.bytes << " bytes"
       << (which.registered ? ", registered" : "");
}

class ShmProtocolKill : public ::testing::TestWithParam<Killing> {};
INSTANTIATE_TEST_SUITE_P(
    Of, ShmProtocolKill,
    ::testing::Values(Killing{2, 4, false}, Killing{3, 4, false},
                      Killing{3, 4096, false}, Killing{2, 40'000, false},
                      Killing{4, 1 << 20, false}, Killing{2, 4 << 20, false},
                      Killing{3, 1 << 20, true}));

TEST_P(ShmProtocolKill, AtAnyMomentIsNoticedByAllPeers) {
  const auto& which = GetParam();
  std::mt19937 random(which.size * 1000 + which.bytes);
  for (int repeated = 0; repeated < 6; ++repeated) {
    const int victim = static_cast<int>(random() % which.size);
    ForkedWorld world(which.size, default_tuning(which.size),
                      [&](Group& group, Signs& signs) {
                        all_reduce_for_ever(group, signs, which.bytes,
                                            which.registered);
                      });
    ASSERT_TRUE(world.await_steps(1));
    sleep_for(microseconds(random() % 8000));
    world.signal(victim, SIGKILL);
    expect_named(world.finish(kNoticed), victim,
                 "rank " + std::to_string(victim));
  }
}

TEST(ShmProtocolFaults, KillBeforeTheFirstCollectiveIsNoticedByAllPeers) {
  for (int victim : {0, 1, 2}) {
    ForkedWorld world(3, default_tuning(3), [&](Group& group, Signs& signs) {
      signs.steps[group.rank()].store(1);
      while (group.rank() == victim) ::pause();
      group.barrier(kEndless);
    });
    ASSERT_TRUE(world.await_steps(1));
    world.signal(victim, SIGKILL);
    expect_named(world.finish(kNoticed), victim,
                 "rank " + std::to_string(victim));
  }
}

TEST(ShmProtocolFaults, KilledRankIsCalledByItsGlobalName) {
  ForkedWorld world(3, default_tuning(3),
                    [&](Group& group, Signs& signs) {
                      all_reduce_for_ever(group, signs, 64, false);
                    },
                    {4, 17, 23});
  ASSERT_TRUE(world.await_steps(10));
  world.signal(1, SIGKILL);
  expect_named(world.finish(kNoticed), 1, "rank 17");
}

TEST(ShmProtocolFaults, RankThatEndsWithoutLeavingIsNoticed) {
  ForkedWorld world(3, default_tuning(3), [&](Group& group, Signs&) {
    group.barrier(kEndless);
    if (group.rank() == 0) ::_exit(3);
    group.barrier(kEndless);
  });
  expect_named(world.finish(kNoticed), 0, "rank 0");
}

TEST(ShmProtocolFaults, KillWhileAMessageIsAwaitedIsNoticed) {
  ForkedWorld world(2, default_tuning(2), [&](Group& group, Signs& signs) {
    signs.steps[group.rank()].store(1);
    while (group.rank() == 1) ::pause();
    float data = 0;
    auto message = group.start_receive(
        1, 5, {.data = &data, .size = sizeof(data)}, DType::float32);
    group.wait(*message, kEndless);
  });
  ASSERT_TRUE(world.await_steps(1));
  world.signal(1, SIGKILL);
  expect_named(world.finish(kNoticed), 1, "rank 1");
}

TEST(ShmProtocolFaults, StoppedRankIsNamedAtTheDeadline) {
  ForkedWorld world(3, default_tuning(3), [&](Group& group, Signs& signs) {
    try {
      for (uint64_t step = 1;; ++step) {
        group.barrier(milliseconds(500));
        signs.steps[group.rank()].store(step);
      }
    } catch (const GroupBroken&) {
      signs.go.fetch_add(1);
      throw;
    }
  });
  ASSERT_TRUE(world.await_steps(10));
  world.signal(2, SIGSTOP);
  ASSERT_TRUE(world.await([&] { return world.signs().go.load() == 2; }));
  world.signal(2, SIGCONT);
  const auto ends = world.finish(kNoticed);
  for (int rank : {0, 1}) {
    EXPECT_EQ(ends[rank].kind, End::Kind::broken) << ends[rank];
    EXPECT_THAT(
        ends[rank].words,
        AllOf(HasSubstr("rank 2"), HasSubstr("barrier"), HasSubstr("500 ms")));
  }
  // Rank 2 learns that the others have given up.
  EXPECT_EQ(ends[2].kind, End::Kind::broken) << ends[2];
}

TEST(ShmProtocolFaults, StoppedRankGoesOnIfContinuedInTime) {
  ForkedWorld world(3, default_tuning(3), [&](Group& group, Signs& signs) {
    const Values values(2, 100'000);
    std::vector<std::byte> room(800'000);
    Caller caller(group, values, kEndless);
    for (uint64_t step = 1; step <= 3000; ++step) {
      caller.run({.operation = Operation::all_reduce,
                  .count = mixed(step) % 25'000,
                  .step = step},
                 room.data());
      signs.steps[group.rank()].store(step);
    }
  });
  for (int stopped : {1, 0, 2}) {
    ASSERT_TRUE(world.await_steps(100 * (stopped + 1)));
    world.signal(stopped, SIGSTOP);
    sleep_for(milliseconds(250));
    world.signal(stopped, SIGCONT);
  }
  EXPECT_EQ(faults(world.finish(seconds(60))), "");
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
