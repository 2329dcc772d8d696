#include "lockstep/worker/status_board.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/shared_memory.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{20'000};

StatusBoard another(const StatusBoard& board) {
  return StatusBoard::map(
      FileDescriptor(::fcntl(board.descriptor(), F_DUPFD_CLOEXEC, 0)));
}

// Returns a status of which every figure is `value`.
RankStatus status_of(int value) {
  RankStatus status;
  status.pid = value;
  status.rank = value;
  status.published_ns = value;
  status.steps = value;
  status.samples = value;
  status.comm_ns = value;
  status.current_operation.set(std::to_string(value));
  status.progress.set(std::to_string(value));
  status.profile = value;
  return status;
}

TEST(ShortText, KeepsWhatFits) {
  ShortText<4> text;
  EXPECT_EQ(text.view(), "");
  text.set("abc");
  EXPECT_EQ(text.view(), "abc");
  text.set("vwxyz");
  EXPECT_EQ(text.view(), "vwx");
  text.set("");
  EXPECT_EQ(text.view(), "");
}

TEST(StatusBoard, WhatOneProcessPublishesAnotherReads) {
  StatusBoard board = StatusBoard::create(3);
  StatusBoard other = another(board);
  EXPECT_EQ(other.places(), 3);
  EXPECT_FALSE(other.read(2));
  board.publish(2, status_of(7));
  ASSERT_TRUE(other.read(2));
  EXPECT_EQ(other.read(2)->samples, 7);
  EXPECT_EQ(other.read(2)->progress.view(), "7");
  EXPECT_FALSE(other.read(0));
  EXPECT_FALSE(other.read(1));
  other.publish(0, status_of(1));
  EXPECT_EQ(board.read(0)->pid, 1);
  board.clear(2);
  EXPECT_FALSE(other.read(2));
  EXPECT_TRUE(other.read(0));
}

// The board of an agent that lies can have any number there: a reader counted
// on for ever from the largest.
TEST(StatusBoard, AnyNumberOfEventsIsRead) {
  const StatusBoard board = StatusBoard::create(1);
  struct stat facts {};
  ASSERT_EQ(::fstat(board.descriptor(), &facts), 0);
  const SharedMemory memory = SharedMemory::map(
      FileDescriptor(::fcntl(board.descriptor(), F_DUPFD_CLOEXEC, 0)),
      static_cast<size_t>(facts.st_size));
  auto* words = reinterpret_cast<int64_t*>(memory.data());
  for (const int64_t number : {INT64_MAX, INT64_MIN, int64_t{-1}}) {
    std::fill_n(words + 1, 9, number);  // the header without its version
    EXPECT_TRUE(board.events_after(0).empty());
    EXPECT_TRUE(board.events_after(INT64_MAX).empty());
  }
}

TEST(StatusBoard, TheLastEventsAreKept) {
  StatusBoard board = StatusBoard::create(1);
  const StatusBoard other = another(board);
  EXPECT_TRUE(other.events_after(0).empty());
  board.add_event("rank 1 failed: exit code 3");
  board.add_event("the job has ended well", /*ends=*/true);
  const auto two = other.events_after(0);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].number, 1);
  EXPECT_EQ(two[0].ends, 0);
  EXPECT_EQ(two[0].text.view(), "rank 1 failed: exit code 3");
  EXPECT_GT(two[0].time_ns, 0);
  EXPECT_EQ(two[1].ends, 1);
  ASSERT_EQ(other.events_after(1).size(), 1u);
  EXPECT_TRUE(other.events_after(2).empty());

  for (int i = 3; i <= 20; ++i) board.add_event(std::to_string(i));
  const auto last = other.events_after(1);
  ASSERT_EQ(last.size(), static_cast<size_t>(StatusBoard::kEvents));
  EXPECT_EQ(last.front().text.view(), "13");
  EXPECT_EQ(last.back().text.view(), "20");
  EXPECT_FALSE(other.read(0)) << "no worker has published";
}

TEST(StatusBoard, AReaderSeesNoPartOfAnUpdate) {
  StatusBoard board = StatusBoard::create(1);
  StatusBoard other = another(board);
  std::atomic<bool> ends{false};
  std::thread writer([&] {
    for (int value = 1; !ends; value = value % 1'000'000 + 1) {
      board.publish(0, status_of(value));
    }
  });
  int seen = 0;
  for (int i = 0; i < 200'000 || seen == 0; ++i) {
    const auto status = other.read(0);
    if (!status) continue;
    ++seen;
    const int value = status->pid;
    ASSERT_EQ(status->steps, value);
    ASSERT_EQ(status->current_operation.view(), std::to_string(value));
    ASSERT_EQ(status->profile, value);
  }
  ends = true;
  writer.join();
}

TEST(StatusBoard, SomebodyWhoLooksWakesThoseWhoWait) {
  StatusBoard board = StatusBoard::create(1);
  StatusBoard other = another(board);
  EXPECT_FALSE(board.is_watched());
  const uint32_t calls = board.calls();
  std::atomic<bool> woken{false};
  std::thread waiter([&] {
    const Deadline deadline = Deadline::after(kLong);
    while (board.calls() == calls && !deadline.expired()) {
      board.wait(calls, kLong);
    }
    woken = !deadline.expired();
  });
  other.watch(milliseconds(60'000));
  waiter.join();
  EXPECT_TRUE(woken);
  EXPECT_TRUE(board.is_watched());
  // A call that was missed makes the wait end at once.
  board.wait(calls, kLong);
  // A shorter time does not take the longer one back.
  board.watch(milliseconds(1));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_TRUE(board.is_watched());
}

TEST(StatusBoard, IsWatchedForAWhileOnly) {
  StatusBoard board = StatusBoard::create(1);
  board.watch(milliseconds(1));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(board.is_watched());
}

TEST(StatusBoard, RefusesWhatIsNoBoard) {
  const auto zeros = [](size_t bytes) {
    const auto memory = SharedMemory::create(bytes);
    StatusBoard::map(
        FileDescriptor(::fcntl(memory.descriptor(), F_DUPFD_CLOEXEC, 0)));
  };
  EXPECT_THROW(zeros(100), std::invalid_argument);
  // The size is right, but there is no header.
  const auto size = SharedMemory::create(4096).size();
  EXPECT_THROW(zeros(size), std::invalid_argument);
  const StatusBoard board = StatusBoard::create(1);
  FileDescriptor file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  EXPECT_ANY_THROW(StatusBoard::map(std::move(file)));
}

TEST(StatusBoard, ProfilesAreNumbered) {
  StatusBoard board = StatusBoard::create(1);
  StatusBoard other = another(board);
  EXPECT_EQ(board.last_profile().number, 0);
  EXPECT_EQ(board.ask_profile(milliseconds(250), 12), 1);
  EXPECT_EQ(board.ask_profile(milliseconds(500), 34), 2);
  EXPECT_EQ(other.last_profile().number, 2);
  EXPECT_EQ(other.last_profile().duration, milliseconds(500));
  EXPECT_EQ(other.last_profile().first_step, 34);
}

}  // namespace
}  // namespace lockstep::internal
