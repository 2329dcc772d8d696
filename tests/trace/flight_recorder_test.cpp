#include "lockstep/trace/flight_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::internal {
namespace {

using std::chrono::nanoseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Clock = FlightRecorder::Clock;

FlightRecorderPtr recorder_of(size_t capacity) {
  return FlightRecorder::make(
      {.name = "g", .rank = 0, .ranks = {0, 1}, .backend = "cpu:gloo"},
      capacity);
}

FlightCall call_number(uint64_t number) {
  return {.operation = "all_reduce",
          .dtype = "Float",
          .reduce_op = "SUM",
          .number = number,
          .in_elements = 10 * number,
          .out_elements = 20 * number};
}

FlightRecord read(const FlightRecorder& recorder, uint64_t id) {
  FlightRecord record{};
  EXPECT_TRUE(recorder.read(id, record)) << id;
  return record;
}

TEST(FlightRecorder, KeepsWhatWasGivenAndWhen) {
  auto flight = recorder_of(4);
  const Clock::time_point begun{nanoseconds(1'000)};
  const Clock::time_point ended{nanoseconds(2'500)};
  const auto id = flight->begin({.operation = "broadcast",
                                 .dtype = "Half",
                                 .number = 7,
                                 .peer = 3,
                                 .in_elements = 5},
                                FlightState::scheduled, begun);
  auto record = read(*flight, id);
  EXPECT_EQ(record.id, 1u);
  EXPECT_STREQ(record.call.operation, "broadcast");
  EXPECT_STREQ(record.call.dtype, "Half");
  EXPECT_EQ(record.call.reduce_op, nullptr);
  EXPECT_EQ(record.call.number, 7u);
  EXPECT_EQ(record.call.peer, 3);
  EXPECT_EQ(record.call.in_elements, 5u);
  EXPECT_EQ(record.call.out_elements, 0u);
  EXPECT_EQ(record.state, FlightState::scheduled);
  EXPECT_EQ(record.created_ns, 1'000);
  EXPECT_EQ(record.thread, ::gettid());
  flight->start(id);
  EXPECT_EQ(read(*flight, id).state, FlightState::started);
  flight->end(id, /*failed=*/false, ended);
  record = read(*flight, id);
  EXPECT_EQ(record.state, FlightState::completed);
  EXPECT_EQ(record.ended_ns, 2'500);
  EXPECT_EQ(flight->last_number(), 7u);
}

TEST(FlightRecorder, FirstEndCountsAndNothingStartsBehindIt) {
  auto flight = recorder_of(4);
  const auto id = flight->begin(call_number(1), FlightState::scheduled);
  flight->end(id, /*failed=*/true, Clock::time_point(nanoseconds(50)));
  flight->end(id, /*failed=*/false, Clock::time_point(nanoseconds(90)));
  flight->start(id);
  EXPECT_EQ(read(*flight, id).state, FlightState::failed);
  EXPECT_EQ(read(*flight, id).ended_ns, 50);
}

TEST(FlightRecorder, RingForgetsTheOldestAndWhatEndsTooLate) {
  auto flight = recorder_of(3);  // rounded up to 4
  EXPECT_EQ(flight->capacity(), 4u);
  std::vector<uint64_t> ids;
  for (uint64_t number = 1; number <= 6; ++number) {
    ids.push_back(flight->begin(call_number(number), FlightState::started));
  }
  EXPECT_EQ(flight->last_id(), 6u);
  FlightRecord record{};
  EXPECT_FALSE(flight->read(ids[0], record));
  EXPECT_FALSE(flight->read(ids[1], record));
  for (uint64_t number = 3; number <= 6; ++number) {
    EXPECT_EQ(read(*flight, ids[number - 1]).call.number, number);
  }
  // Record 5 has overwritten record 1, so ending 1 must not change it.
  flight->end(ids[0], /*failed=*/true);
  EXPECT_EQ(read(*flight, ids[4]).state, FlightState::started);
  EXPECT_EQ(read(*flight, ids[4]).call.number, 5u);
}

TEST(FlightRecorder, MessagesDoNotCountAsCollectives) {
  auto flight = recorder_of(4);
  flight->begin(call_number(9), FlightState::started);
  flight->begin({.operation = "send", .peer = 1}, FlightState::started);
  EXPECT_EQ(flight->last_number(), 9u);
  EXPECT_EQ(flight->last_id(), 2u);
}

// The lower number of two could stay the last one, and a dump then left the
// other collective out.
TEST(FlightRecorder, OfTwoThreadsThatBeginAtOnceTheHigherNumberIsTheLast) {
  auto flight = recorder_of(16);
  constexpr uint64_t kPairs = 20'000;
  // Sleeping threads would wake one after the other.
  std::atomic<uint64_t> arrivals{0};
  std::atomic<uint64_t> wrong{0};
  const auto meet = [&](uint64_t number) {
    arrivals.fetch_add(1);
    while (arrivals.load() < number) {
    }
  };
  const auto begin_every_other = [&](uint64_t first) {
    for (uint64_t number = first; number <= 2 * kPairs; number += 2) {
      const uint64_t pair = (number + 1) / 2;
      meet(4 * pair - 2);
      flight->begin(call_number(number), FlightState::started);
      meet(4 * pair);
      if (flight->last_number() != 2 * pair) wrong.fetch_add(1);
    }
  };
  std::thread other(begin_every_other, 1);
  begin_every_other(2);
  other.join();
  EXPECT_EQ(wrong.load(), 0u);
}

TEST(FlightRecorder, RecordsNothingWhenOff) {
  auto flight = recorder_of(0);
  const auto id = flight->begin(call_number(1), FlightState::started);
  EXPECT_EQ(id, 0u);
  flight->start(id);
  flight->end(id, /*failed=*/false);
  FlightRecord record{};
  EXPECT_FALSE(flight->read(0, record));
  EXPECT_FALSE(flight->read(1, record));
}

TEST(FlightRecorder, EnvironmentSaysHowManyAndMistakesAreNamed) {
  ASSERT_EQ(::unsetenv("LOCKSTEP_FLIGHT_RECORDS"), 0);
  EXPECT_EQ(FlightRecorder::default_capacity(), 1024u);
  ::setenv("LOCKSTEP_FLIGHT_RECORDS", "0", 1);
  EXPECT_EQ(FlightRecorder::default_capacity(), 0u);
  ::setenv("LOCKSTEP_FLIGHT_RECORDS", "many", 1);
  EXPECT_THAT([] { FlightRecorder::default_capacity(); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("LOCKSTEP_FLIGHT_RECORDS"),
                        HasSubstr("\"many\""), HasSubstr("0 to 1048576"))));
  ::unsetenv("LOCKSTEP_FLIGHT_RECORDS");
}

TEST(FlightRecorder, NewsAreToldOnce) {
  auto flight = recorder_of(4);
  EXPECT_TRUE(flight->has_news());  // no news was taken yet
  EXPECT_FALSE(flight->has_news());
  const auto id = flight->begin(call_number(1), FlightState::started);
  EXPECT_TRUE(flight->has_news());
  EXPECT_FALSE(flight->has_news());
  flight->end(id, /*failed=*/true);
  EXPECT_TRUE(flight->has_news());
  EXPECT_FALSE(flight->has_news());
}

TEST(FlightRecorder, ListHoldsTheLivingInTheOrderOfTheirMaking) {
  auto names = [] {
    std::vector<std::string> all;
    const FlightRecorder::Reading reading;
    for (auto* one = reading.first(); one != nullptr; one = one->next()) {
      all.push_back(one->group().name);
    }
    return all;
  };
  auto a = FlightRecorder::make({"a", 0, {0}, ""}, 1);
  auto b = FlightRecorder::make({"b", 0, {0}, ""}, 1);
  auto off = FlightRecorder::make({"off", 0, {0}, ""}, 0);
  auto c = FlightRecorder::make({"c", 0, {0}, ""}, 1);
  EXPECT_THAT(names(), ::testing::ElementsAre("a", "b", "c"));
  b.reset();
  EXPECT_THAT(names(), ::testing::ElementsAre("a", "c"));
  a.reset();
  c.reset();
  EXPECT_THAT(names(), ::testing::IsEmpty());
}

// All fields of a record that was read belong together, although threads write
// meanwhile.
TEST(FlightRecorder, ReaderSeesWholeRecordsWhileThreadsWriteAndEnd) {
  constexpr uint64_t kCapacity = 64;
  auto flight = recorder_of(kCapacity);
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  std::atomic<int> whole{0};
  auto enough = [&] { return whole >= 20'000 || deadline.expired(); };
  std::atomic<uint64_t> numbers{0};
  std::vector<std::thread> writers;
  for (int i = 0; i < 2; ++i) {
    writers.emplace_back([&] {
      uint64_t before = 0;
      while (!enough()) {
        const auto number = ++numbers;
        const auto id =
            flight->begin(call_number(number), FlightState::scheduled,
                          Clock::time_point(nanoseconds(number)));
        flight->start(id);
        // Ends it late, as an asynchronous call does.
        flight->end(before, number % 7 == 0);
        before = id;
      }
    });
  }
  std::thread reader([&] {
    while (!enough()) {
      const uint64_t last = flight->last_id();
      const uint64_t oldest = last > kCapacity ? last - kCapacity : 0;
      for (uint64_t id = oldest + 1; id <= last; ++id) {
        FlightRecord record{};
        if (!flight->read(id, record)) continue;
        const auto& call = record.call;
        EXPECT_EQ(record.id, id);
        EXPECT_EQ(call.in_elements, 10 * call.number);
        EXPECT_EQ(call.out_elements, 20 * call.number);
        EXPECT_EQ(record.created_ns, static_cast<int64_t>(call.number));
        ++whole;
      }
    }
  });
  for (auto& writer : writers) writer.join();
  reader.join();
  EXPECT_GE(whole, 20'000);
}

// A group ends while another thread dumps.
TEST(FlightRecorder, RetiresOnlyWhenNobodyReads) {
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) {
      const FlightRecorder::Reading reading;
      for (auto* one = reading.first(); one != nullptr; one = one->next()) {
        ASSERT_EQ(one->group().name, "short");
        FlightRecord record{};
        if (one->read(1, record)) {
          ASSERT_EQ(record.call.number, 1u);
        }
      }
    }
  });
  for (int i = 0; i < 300; ++i) {
    auto flight = FlightRecorder::make({"short", 0, {0}, ""}, 2);
    flight->end(flight->begin(call_number(1), FlightState::started), false);
  }
  done = true;
  reader.join();
}

}  // namespace
}  // namespace lockstep::internal
