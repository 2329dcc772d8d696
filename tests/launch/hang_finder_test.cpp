// Tests what is found by a board and by files, without workers.
#include "lockstep/launch/watch/hang_finder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr milliseconds kAllowedToStand{300};

class HangFinderTest : public ::testing::Test {
 protected:
  // Worker 0 of the board is this process.
  static RankStatus status() {
    RankStatus status;
    status.pid = getpid();
    status.rank = 8;
    status.published_ns = 1;
    status.steps = 3;
    return status;
  }
  // Looks until `end` is true or something was found, for `time` at most.
  template <class End>
  std::vector<HungWorker> look(milliseconds time, const End& end) {
    const Deadline deadline = Deadline::after(time);
    std::vector<HungWorker> found;
    while (found.empty() && !end() && !deadline.expired()) {
      std::this_thread::sleep_for(
          std::min(finder_.most_wait(), milliseconds(5)));
      found = finder_.look(workers_);
    }
    return found;
  }
  std::vector<HungWorker> look(milliseconds time) {
    return look(time, [] { return false; });
  }

  fs::path folder() const { return folder_.path(); }

  testing::TemporaryFolder folder_;
  StatusBoard board_ = StatusBoard::create(1);
  std::vector<WorkerStatus> workers_{{.rank = 8, .pid = getpid()}};
  HangFinder finder_{kAllowedToStand, /*alone=*/true, &board_, folder_.path()};
};

TEST_F(HangFinderTest, AsksForStacksAndFindsAWorkerOnce) {
  board_.publish(0, status());
  EXPECT_THAT(
      look(milliseconds(20'000), [this] { return board_.last_stacks() == 1; }),
      IsEmpty());
  // The worker answers.
  std::ofstream(folder() / StatusBoard::stacks_file(1, 8))
      << R"({"flight_record": "", "threads": [{"thread": )" << getpid()
      << R"(, "name": "main", "frames": ["here +0x1"], "missing": ""}]})";
  RankStatus answered = status();
  answered.stacks = 1;
  board_.publish(0, answered);
  const auto found = look(milliseconds(20'000));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].local_rank, 0);
  EXPECT_THAT(found[0].message, HasSubstr("in no operation, in step 3"));
  EXPECT_THAT(found[0].stack, ::testing::ElementsAre("here +0x1"));
  EXPECT_FALSE(fs::exists(folder() / StatusBoard::stacks_file(1, 8)));
  std::ifstream text(folder() / HangFinder::kStacksFile);
  std::string first;
  std::getline(text, first);
  EXPECT_EQ(first, "rank 8, process " + std::to_string(getpid()));
}

TEST_F(HangFinderTest, ProgressWhileStacksAreAwaitedIsNoHang) {
  board_.publish(0, status());
  EXPECT_THAT(
      look(milliseconds(20'000), [this] { return board_.last_stacks() == 1; }),
      IsEmpty());
  const auto file = folder() / StatusBoard::stacks_file(1, 8);
  std::ofstream(file) << "{}";
  RankStatus moved = status();
  moved.stacks = 1;
  moved.samples = 1;
  board_.publish(0, moved);
  EXPECT_THAT(look(milliseconds(20'000), [&file] { return !fs::exists(file); }),
              IsEmpty());
  EXPECT_FALSE(fs::exists(file));
  // The next time the worker stands still it is asked anew.
  EXPECT_THAT(
      look(milliseconds(20'000), [this] { return board_.last_stacks() == 2; }),
      IsEmpty());
}

TEST_F(HangFinderTest, AWorkerThatHasLeftItsGroupIsNotWatched) {
  RankStatus left = status();
  left.has_left = 1;
  board_.publish(0, left);
  EXPECT_THAT(look(3 * kAllowedToStand), IsEmpty());
  EXPECT_EQ(board_.last_stacks(), 0);
  EXPECT_TRUE(finder_.watches_nobody());
  EXPECT_FALSE(finder_.watches_nobody()) << "said twice";
}

TEST_F(HangFinderTest, WorkersThatHaveEndedAreNotWatched) {
  board_.publish(0, status());
  look(milliseconds(20'000), [this] { return board_.is_watched(); });
  workers_[0].exit_code = 0;
  EXPECT_THAT(look(3 * kAllowedToStand), IsEmpty());
  EXPECT_EQ(board_.last_stacks(), 0);
  EXPECT_FALSE(finder_.watches_nobody());
}

TEST_F(HangFinderTest, AWorkerThatMayWaitForAnotherNodeSaysSo) {
  RankStatus waiting = status();
  waiting.current_since_ns = 5;
  waiting.current_number = 7;
  waiting.current_operation.set("all_reduce");
  waiting.current_group.set("world");
  waiting.stacks = 1;
  board_.publish(0, waiting);
  HangFinder finder(kAllowedToStand, /*alone=*/false, &board_, folder());
  std::vector<HungWorker> found;
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  while (found.empty() && !deadline.expired()) {
    std::this_thread::sleep_for(milliseconds(5));
    found = finder.look(workers_);
  }
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_TRUE(found[0].waits_for_others);
  EXPECT_THAT(found[0].message,
              HasSubstr("in all_reduce 7 (world), in step 3\nthe rank for "
                        "which it waits may be on another node"));
}

// An evaluation makes no steps.
TEST_F(HangFinderTest, AProgressBarThatMovesIsProgress) {
  RankStatus moving = status();
  const Deadline end = Deadline::after(3 * kAllowedToStand);
  while (!end.expired()) {
    moving.progress.set(std::to_string(end.remaining().count()));
    board_.publish(0, moving);
    EXPECT_THAT(look(milliseconds(20)), IsEmpty());
  }
  EXPECT_EQ(board_.last_stacks(), 0);
}

}  // namespace
}  // namespace lockstep::internal
