#include "lockstep/trace/operation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Clock = FlightRecorder::Clock;

FlightRecorderPtr recorder_of_two(size_t capacity = 8) {
  return FlightRecorder::make(
      {.name = "pg", .rank = 0, .ranks = {4, 5}, .backend = "cpu:gloo"},
      capacity);
}

Operation all_reduce(FlightRecorder& recorder, FlightState state,
                     Operation::Spans spans) {
  return {recorder, {.operation = "all_reduce", .dtype = "Float", .number = 7},
          state,    spans,
          24,       Clock::now()};
}

FlightState state_of(const FlightRecorder& recorder, uint64_t id) {
  FlightRecord record{};
  EXPECT_TRUE(recorder.read(id, record));
  return record.state;
}

// Writes what it is told as text.
class Observer : public SpanObserver {
 public:
  void on_begin(const SpanBegin& begin) noexcept override {
    std::string text = std::string(begin.category) + " " +
                       std::string(begin.name) +
                       (begin.detached ? " detached" : "");
    for (const auto& [key, value] : begin.attributes) {
      const auto* number = std::get_if<int64_t>(&value);
      text +=
          " " + std::string(key) + "=" +
          (number != nullptr ? std::to_string(*number)
                             : std::string(std::get<std::string_view>(value)));
    }
    told.push_back(text);
  }
  void on_end(const SpanEnd& end) noexcept override {
    told.emplace_back(end.failed ? "failed" : "ended");
  }

  std::vector<std::string> told{};
};

TEST(Operation, FlightRecordAndSpanSeeOneBeginAndTheFirstEnd) {
  const auto recorder = recorder_of_two();
  const auto observer = std::make_shared<Observer>();
  const SpanSubscription subscription(observer);
  auto operation =
      all_reduce(*recorder, FlightState::scheduled, Operation::Spans::detached);
  EXPECT_EQ(state_of(*recorder, 1), FlightState::scheduled);
  operation.start();
  EXPECT_EQ(state_of(*recorder, 1), FlightState::started);
  operation.end(/*failed=*/true);
  operation.end(/*failed=*/false);
  EXPECT_EQ(state_of(*recorder, 1), FlightState::failed);
  EXPECT_EQ(recorder->last_id(), 1u);
  EXPECT_THAT(observer->told,
              ElementsAre("comm all_reduce detached group=pg number=7 "
                          "bytes=24 world_size=2",
                          "failed"));
}

TEST(Operation, EndsWhereItWasMovedTo) {
  const auto recorder = recorder_of_two();
  const auto observer = std::make_shared<Observer>();
  const SpanSubscription subscription(observer);
  {
    auto first =
        all_reduce(*recorder, FlightState::started, Operation::Spans::detached);
    std::optional<Operation> second(std::move(first));
    first.end(/*failed=*/true);  // ends nothing
    EXPECT_EQ(state_of(*recorder, 1), FlightState::started);
    EXPECT_TRUE(second->is_recorded());
    EXPECT_TRUE(second->has_span());
    std::thread([&] { second->end(/*failed=*/false); }).join();
    EXPECT_FALSE(second->is_recorded());
    EXPECT_FALSE(second->has_span());
  }
  EXPECT_EQ(state_of(*recorder, 1), FlightState::completed);
  EXPECT_THAT(observer->told, ElementsAre(testing::_, "ended"));
}

TEST(Operation, HasASpanOnlyIfItShallAndOneIsObserved) {
  const auto recorder = recorder_of_two();
  const auto observer = std::make_shared<Observer>();
  EXPECT_FALSE(
      all_reduce(*recorder, FlightState::started, Operation::Spans::nested)
          .has_span());
  const SpanSubscription subscription(observer);
  EXPECT_FALSE(
      all_reduce(*recorder, FlightState::started, Operation::Spans::none)
          .has_span());
  EXPECT_THAT(observer->told, IsEmpty());
  EXPECT_TRUE(
      all_reduce(*recorder, FlightState::started, Operation::Spans::nested)
          .has_span());
}

TEST(Operation, WithoutAFlightRecorderTheSpanIsStillSeen) {
  const auto recorder = recorder_of_two(0);
  const auto observer = std::make_shared<Observer>();
  const SpanSubscription subscription(observer);
  auto operation =
      all_reduce(*recorder, FlightState::scheduled, Operation::Spans::nested);
  EXPECT_FALSE(operation.is_recorded());
  operation.start();
  operation.end(/*failed=*/false);
  EXPECT_THAT(observer->told, ElementsAre(testing::_, "ended"));
}

}  // namespace
}  // namespace lockstep::internal
