// Ranks that wait for each other in different calls, which no announcements
// compare; and waits that only look like that.
#include "lockstep/comm/shm/protocol/standstill.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/trace/current_call.h"
#include "tests/comm/shm/bucket_rounds.h"
#include "tests/comm/shm/protocol_world.h"
#include "tests/harness/asleep.h"

namespace lockstep::internal::shm::testing {
namespace {

using internal::testing::await_asleep;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr milliseconds kEndless{600'000};
// Longer than a standstill can stay unnoticed.
constexpr milliseconds kLong{1'000};

const Values& values() {
  static const Values all(7, 4096);
  return all;
}

void receive(Group& group, int from) {
  std::array<float, 4> data{};
  const auto message = group.start_receive(
      from, 0, {.data = data.data(), .size = sizeof(data)}, DType::float32);
  group.wait(*message, kEndless);
}

void send(Group& group, int to) {
  const std::array<float, 4> data{};
  const auto message = group.start_send(
      to, 0, {.data = data.data(), .size = sizeof(data)}, DType::float32);
  group.wait(*message, kEndless);
}

// The threads of the ranks, or 0 for one that has not come yet.
using Threads = std::array<std::atomic<pid_t>, 3>;

// Makes a rank late: returns when `waiting` have slept in their calls for so
// long that they could be taken for ranks that wait in vain.
void come_late(const Threads& threads, std::initializer_list<int> waiting) {
  for (const int rank : waiting) {
    EXPECT_TRUE(await_asleep(threads[rank]));
  }
  sleep_for(kLong);
}

// The ranks are threads; only one thread uses each rank's group.
std::vector<End> ends_of(int ranks, const std::function<void(Group&)>& body) {
  ThreadWorld world(ranks, small_tuning());
  return world.run(body);
}

void expect_told(const std::vector<End>& ends, const std::string& words) {
  for (const auto& end : ends) {
    EXPECT_EQ(end.kind, End::Kind::broken) << end;
    EXPECT_THAT(end.words, AllOf(HasSubstr("the ranks wait for each other"),
                                 HasSubstr(words)));
  }
}

TEST(Standstill, OfBucketsAndABarrierIsToldToAllRanks) {
  for (const int ranks : {2, 3, 5}) {
    expect_told(ends_of(ranks,
                        [](Group& group) {
                          BucketRank buckets(group, values(),
                                             {.buckets = {{.count = 100}},
                                              .timeout = kEndless});
                          buckets.run(1);
                          if (group.rank() == 1) group.barrier(kEndless);
                          buckets.run(2);
                        }),
                "rank 1 in barrier #");
  }
}

TEST(Standstill, NamesTheUsersCalls) {
  const auto ends = ends_of(2, [](Group& group) {
    CurrentCall call{.operation = group.rank() == 0 ? "all_gather" : "barrier",
                     .number = 41,
                     .function = group.rank() == 0 ? "save()" : nullptr};
    const CurrentCallScope scope(&call);
    BucketRank buckets(group, values(),
                       {.buckets = {{.count = 100}}, .timeout = kEndless});
    if (group.rank() == 0) group.barrier(kEndless);
    buckets.run(1);
  });
  expect_told(ends, "rank 0 in save(), at all_gather #41");
}

TEST(Standstill, IsNoneWhileAnotherThreadOfARankMayComeToTheCall) {
  Threads threads{};
  const auto ends = ends_of(2, [&](Group& group) {
    std::thread([&] { group.barrier(kEndless); }).join();
    BucketRank buckets(group, values(),
                       {.buckets = {{.count = 100}}, .timeout = kEndless});
    threads[group.rank()] = ::gettid();
    if (group.rank() == 1) {
      group.barrier(kEndless);
      buckets.run(1);
      return;
    }
    std::thread other([&] {
      come_late(threads, {0, 1});
      group.barrier(kEndless);
    });
    buckets.run(1);
    other.join();
  });
  EXPECT_EQ(faults(ends), "");
}

TEST(Standstill, IsNoneWhileARankComputes) {
  Threads threads{};
  const auto ends = ends_of(3, [&](Group& group) {
    BucketRank buckets(group, values(),
                       {.buckets = {{.count = 100}}, .timeout = kEndless});
    threads[group.rank()] = ::gettid();
    for (int late = 0; late < 3; ++late) {
      const int next = (late + 1) % 3;
      const int last = (late + 2) % 3;
      if (group.rank() == late) come_late(threads, {next, last});
      buckets.run(late);
      if (group.rank() == next) come_late(threads, {late, last});
      group.barrier(kEndless);
    }
  });
  EXPECT_EQ(faults(ends), "");
}

// The awaited message may come from a thread that has not used the group yet.
TEST(Standstill, IsNoneWhereOneWaitsForAMessage) {
  Threads threads{};
  const auto ends = ends_of(2, [&](Group& group) {
    threads[group.rank()] = ::gettid();
    if (group.rank() == 1) {
      receive(group, 0);
      return group.barrier(kEndless);
    }
    std::thread sender([&] {
      come_late(threads, {0, 1});
      send(group, 1);
    });
    group.barrier(kEndless);
    sender.join();
  });
  EXPECT_EQ(faults(ends), "");
}

}  // namespace
}  // namespace lockstep::internal::shm::testing
