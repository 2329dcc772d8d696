// Which workers hang, by made-up progress and times.
#include "lockstep/launch/watch/hang_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::internal {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto kAllowed = 10s;

class HangWatchTest : public ::testing::Test {
 protected:
  using Clock = HangWatch::Clock;
  using Workers = std::vector<std::optional<WorkerProgress>>;

  // Looks as often as a caller must until so much time has passed; returns what
  // the last look found. The looks before must have found nothing.
  std::vector<int> after(Clock::duration time, const Workers& workers) {
    const auto end = now_ + time;
    std::vector<int> found;
    while (now_ < end) {
      EXPECT_THAT(found, IsEmpty()) << "found too early";
      now_ = std::min(now_ + watch_.interval(), end);
      found = watch_.look(workers, now_);
    }
    return found;
  }
  static WorkerProgress computing(int64_t count) { return {.counts = {count}}; }
  // In an operation since `active_ns`.
  static WorkerProgress waiting(int64_t active_ns) {
    return {
        .counts = {active_ns}, .in_operation = true, .active_ns = active_ns};
  }

  Clock::time_point now_{};
  HangWatch watch_{kAllowed, /*alone=*/true, now_};
};

TEST_F(HangWatchTest, TheWorkerThatComputesHangsAndThoseThatWaitDoNot) {
  const Workers workers{waiting(1), computing(1), waiting(2)};
  EXPECT_THAT(after(kAllowed, workers), IsEmpty());
  EXPECT_THAT(after(watch_.interval(), workers), ElementsAre(1));
  EXPECT_EQ(watch_.standing(1), kAllowed);
}

TEST_F(HangWatchTest, AnyProgressBeginsTheTimeAnew) {
  for (int64_t step = 0; step < 5; ++step) {
    EXPECT_THAT(after(9s, {computing(step), computing(step)}), IsEmpty());
  }
  // Every one of the counts is progress.
  WorkerProgress other = computing(5);
  for (int64_t& count : other.counts) {
    EXPECT_THAT(after(9s, {other, other}), IsEmpty());
    ++count;
  }
  // Worker 0 goes on, and worker 1 does not.
  EXPECT_THAT(after(6s, {computing(100), computing(100)}), IsEmpty());
  EXPECT_THAT(after(4s, {computing(101), computing(100)}), IsEmpty());
  EXPECT_THAT(after(1s, {computing(102), computing(100)}), ElementsAre(1));
}

TEST_F(HangWatchTest, WhoeverIsWaitedForMayTakeAsLongAsItMakesProgress) {
  for (int64_t sample = 0; sample < 20; ++sample) {
    EXPECT_THAT(after(5s, {computing(sample), waiting(1)}), IsEmpty());
  }
}

TEST_F(HangWatchTest, IfAllWaitItIsTheOneThatWasActiveLongestAgo) {
  EXPECT_THAT(after(11s, {waiting(30), waiting(10), waiting(20)}),
              ElementsAre(1));
}

TEST_F(HangWatchTest, AStoppedWorkerHangsWhateverItIsIn) {
  WorkerProgress stopped = waiting(3);
  stopped.stopped = true;
  EXPECT_THAT(after(11s, {waiting(2), stopped}), ElementsAre(1));
}

TEST_F(HangWatchTest, SeveralAreInTheOrderInWhichTheyStopped) {
  EXPECT_THAT(after(2s, {computing(1), computing(1), computing(1)}), IsEmpty());
  EXPECT_THAT(after(2s, {computing(2), computing(1), computing(2)}), IsEmpty());
  EXPECT_THAT(after(6s, {computing(2), computing(1), computing(3)}), IsEmpty());
  const Workers workers{computing(2), computing(1), computing(3)};
  for (const auto& expected :
       {std::vector{1}, std::vector{1}, std::vector{1, 0}}) {
    EXPECT_EQ(watch_.look(workers, now_ += 1s), expected);
  }
}

TEST_F(HangWatchTest, OnlyWorkersThatTellSomethingAreWatched) {
  EXPECT_THAT(after(30s, {std::nullopt, std::nullopt}), IsEmpty());
  EXPECT_FALSE(watch_.watches());
  EXPECT_THAT(after(9s, {computing(1), std::nullopt}), IsEmpty());
  EXPECT_TRUE(watch_.watches());
  // It leaves its group, and joins another.
  EXPECT_THAT(after(30s, {std::nullopt, std::nullopt}), IsEmpty());
  EXPECT_THAT(after(9s, {computing(1), std::nullopt}), IsEmpty());
  EXPECT_THAT(after(2s, {computing(1), std::nullopt}), ElementsAre(0));
}

TEST_F(HangWatchTest, AJobThatIsSuspendedAsAWholeDoesNotHang) {
  const Workers workers{computing(1), waiting(1)};
  EXPECT_THAT(after(5s, workers), IsEmpty());
  now_ += 24h;  // the agent does not look either
  EXPECT_THAT(watch_.look(workers, now_), IsEmpty());
  // The gap counted two seconds at most: an interval, and what a busy machine
  // may delay.
  EXPECT_THAT(after(3s, workers), IsEmpty());
  EXPECT_THAT(after(1s, workers), ElementsAre(0));
}

TEST_F(HangWatchTest, OtherNodesKnowBetterForWhomAllWorkersWait) {
  watch_ = HangWatch(kAllowed, /*alone=*/false, now_);
  EXPECT_THAT(after(12s, {waiting(1), waiting(2)}), IsEmpty());
  EXPECT_THAT(after(2s, {waiting(1), waiting(2)}), ElementsAre(0));
  // But not which worker of this node computes.
  watch_ = HangWatch(kAllowed, /*alone=*/false, now_);
  EXPECT_THAT(after(11s, {waiting(1), computing(2)}), ElementsAre(1));
}

}  // namespace
}  // namespace lockstep::internal
