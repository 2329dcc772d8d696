// Ranks that die or stop: faults 1, 2, 3 and 6 of docs/faults.md.
#include <gmock/gmock.h>
#include <signal.h>

#include <random>
#include <thread>

#include "tests/faults/job.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

enum class Harm { death, stop };

class Deaths : public WaysTest {
 protected:
  // Makes a job of two hosts with two ranks each, or of three ranks.
  Job& make() {
    job_ = &make_job(GetParam(), GetParam().hosts == 2 ? 4 : 3);
    return *job_;
  }

  // Never returns rank 0, which has the store.
  int choose_victim() {
    return 1 + static_cast<int>(random_() % (GetParam().hosts == 2 ? 3 : 2));
  }
  // Waits for a random moment in some operation.
  void let_run() { std::this_thread::sleep_for(milliseconds(random_() % 100)); }

  // Returns whether the errors of `rank` must name `victim`. They name a rank
  // that died on their machine, as all of these do. They name a stopped rank if
  // they share memory with it, or if calls are compared.
  bool learns(int rank, int victim, Harm harm) {
    if (harm == Harm::death || GetParam().detail) return true;
    return std::string(GetParam().backend) == "lockstep" &&
           job_->host_of(rank) == job_->host_of(victim);
  }

  void expect_failures(int victim, seconds allowed, Harm harm = Harm::death) {
    job_->await("failed", victim, allowed);
    for (int rank = 0; rank < job_->size(); ++rank) {
      if (rank == victim) continue;
      const auto text = job_->said(rank, "failed");
      EXPECT_THAT(text, HasSubstr("all_reduce"));
      EXPECT_THAT(text, HasSubstr("on rank " + std::to_string(rank)));
      EXPECT_THAT(text, HasSubstr("allowed"));
      if (!learns(rank, victim, harm)) continue;
      // A peer that waited for the victim until it was late itself may be
      // named, too.
      EXPECT_THAT(text, ContainsRegex("rank ([0-9]+, )*" +
                                      std::to_string(victim) + "[^0-9]"));
    }
  }
  seconds after_death() const {
    return seconds(std::string(GetParam().name) == "OneHost" ? 1 : 5);
  }

  std::vector<std::string> arguments() const {
    // A Gloo rank is connected with all others, so the ranks notice a death at
    // the latest when the first of them has ended.
    if (std::string(GetParam().backend) == "gloo") {
      return {"timeout=300000", "end=1"};
    }
    return {"timeout=300000"};
  }

 private:
  Job* job_ = nullptr;
  std::mt19937 random_{seed()};
};

class Pauses : public Deaths {};

TEST_P(Deaths, PeersOfAKilledRankFailAndNameIt) {
  auto& job = make();
  const int victim = choose_victim();
  job.start("loop", arguments());
  job.await("ready");
  let_run();
  job.rank(victim).signal(SIGKILL);
  expect_failures(victim, after_death());
}

TEST_P(Deaths, PeersOfAStoppedRankNameItAtTheDeadline) {
  auto& job = make();
  const int victim = choose_victim();
  job.start("loop", {"timeout=1200", "together=1"});
  job.await("ready");
  let_run();
  job.rank(victim).signal(SIGSTOP);
  expect_failures(victim, seconds(10), Harm::stop);
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank == victim) continue;
    EXPECT_THAT(job.said(rank, "failed"), Not(HasSubstr(" died")));
  }
}

TEST_P(Pauses, AStoppedRankThatGoesOnIsWaitedFor) {
  auto& job = make();
  const int victim = choose_victim();
  job.start("loop");
  job.await("ready");
  let_run();
  job.rank(victim).signal(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(300));  // the pause
  job.rank(victim).signal(SIGCONT);
  for (int rank = 0; rank < job.size(); ++rank) {
    const auto turn = "turn " + std::to_string(rank) + "\n";
    const int before = count(job.rank(rank).out(), turn);
    job.rank(rank).await_output(turn, before + 5);
    EXPECT_EQ(job.said(rank, "failed"), "");
  }
}

TEST_P(Deaths, PeersOfARankThatDiesBeforeItsFirstCollectiveNameIt) {
  auto& job = make();
  const int victim = choose_victim();
  auto given = arguments();
  given.push_back("odd=" + std::to_string(victim));
  job.start("first", given);
  job.await("ready");
  job.rank(victim).signal(SIGKILL);
  expect_failures(victim, after_death());
}

TEST_P(Deaths, WithoutTheStoreEveryRankFailsWithOneLineAndLeaves) {
  auto& job = make();
  auto given = arguments();
  given.push_back("leave=1");
  given.push_back("end=1");
  job.start("loop", given);
  job.await("ready");
  let_run();
  job.rank(0).signal(SIGKILL);
  expect_failures(0, seconds(5));
  for (int rank = 1; rank < job.size(); ++rank) {
    const auto result = job.rank(rank).finish(seconds(10));
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_EQ(count(result.out, "\nleft " + std::to_string(rank) + "\n"), 1);
    EXPECT_THAT(job.said(rank, "failed"), Not(HasSubstr(" | ")));
    EXPECT_THAT(result.err, Not(HasSubstr("terminate")));
  }
}

// Rank 1 dies, rank 2 misses its message and ends, rank 3 misses that of rank
// 2, and so on: all must name rank 1.
TEST_P(Deaths, RanksAlongAChainOfMessagesNameTheFirstThatDied) {
  for (const char* end : {"end=1", "quit=1", "unwind=1"}) {
    SCOPED_TRACE(end);
    auto& job = make_job(GetParam(), 4);
    job.start("chain", {"timeout=300000", end});
    job.await("ready");
    let_run();
    job.rank(1).signal(SIGKILL);
    job.await("failed", 1, seconds(20));
    for (const int rank : {0, 2, 3}) {
      const auto text = job.said(rank, "failed");
      // Ranks that end because of it may be named with it.
      EXPECT_THAT(text,
                  ContainsRegex("rank 1 died|ranks 1(-3| and [23]) died"));
      // Only shared memory carries words from rank to rank.
      if (std::string(GetParam().name) != "OneHost") continue;
      EXPECT_THAT(text,
                  Not(ContainsRegex("rank [023] (died|failed|has left)")));
    }
  }
}

// Rank 3 shares with rank 2 a group in which nobody has died before.
TEST_P(Deaths, TheFirstThatDiedIsNamedInOtherGroupsToo) {
  auto& job = make_job(GetParam(), 4);
  job.start("relay", {"timeout=300000", "quit=1"});
  job.await("ready");
  job.rank(1).signal(SIGKILL);
  job.await("failed", 1, seconds(20));
  for (const int rank : {0, 2, 3}) {
    const auto text = job.said(rank, "failed");
    // Gloo's life signs are asked about the group's ranks only.
    if (std::string(GetParam().backend) == "gloo" && rank == 3) continue;
    EXPECT_THAT(text, ContainsRegex("rank 1 died|ranks 1(-3| and [23]) died"));
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Pauses,
                         ::testing::Values(kOneHost, kTwoHosts, kGloo),
                         way_name);
INSTANTIATE_TEST_SUITE_P(Ways, Deaths,
                         ::testing::Values(kOneHost, kTwoHosts, kTwoHostsDetail,
                                           kGloo, kGlooDetail),
                         way_name);

using DeathsInMemory = FaultsTest;

// Sizes for each algorithm: data inside the announcement, one-shot reads,
// slices of chunks.
TEST_F(DeathsInMemory, OfAnySizeAreNamedInASecond) {
  std::mt19937 random(seed());
  for (const int elements : {1, 4096, 1 << 22}) {
    SCOPED_TRACE(elements);
    auto& job = make_job(kOneHost, 3);
    const int victim = static_cast<int>(random() % 3);
    job.start("loop", {"elements=" + std::to_string(elements)});
    job.await("ready");
    std::this_thread::sleep_for(milliseconds(random() % 50));
    job.rank(victim).signal(SIGKILL);
    job.await("failed", victim, seconds(1));
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_THAT(job.said(rank, "failed"),
                  HasSubstr("rank " + std::to_string(victim) + " died"));
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
