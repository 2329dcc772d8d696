// Training in which ranks are killed, stopped or fail: faults 1, 2, 3, 13, 14,
// 15 and 16 of docs/faults.md, for DistributedDataParallel and the
// sharded optimizer.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <set>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/faults/job.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int kRanks = 3;
constexpr int kOdd = 1;

class Training : public WaysTest {
 protected:
  Job& start(const std::string& scenario,
             std::vector<std::string> arguments = {}) {
    job_ = &make_job(GetParam(), kRanks);
    job_->program = "faults_trainer";
    arguments.push_back("odd=" + std::to_string(kOdd));
    job_->start(scenario, arguments);
    return *job_;
  }

  // Returns whether errors name a rank that does not come or makes another
  // call. Gloo's do so only if calls are compared.
  bool names() const { return in_memory() || GetParam().detail; }
  bool in_memory() const {
    return std::string(GetParam().backend) == "lockstep";
  }
  std::string odd_rank() const { return "rank " + std::to_string(kOdd); }

  // The timeout is far longer than the test waits: the test fails if a death is
  // noticed only at the deadline. On Gloo, ranks that are not connected with
  // the dead rank notice once one of the others has ended.
  std::vector<std::string> dying() const {
    if (in_memory()) return {"timeout=300000"};
    return {"timeout=300000", "end=1"};
  }
  seconds after_death() const { return seconds(in_memory() ? 1 : 10); }

  // Expects that the peers of the odd rank failed, at `place`.
  void expect_failures(const std::string& place, seconds allowed,
                       const std::string& words = {}) {
    job_->await("failed", kOdd, allowed);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == kOdd) continue;
      const auto text = job_->said(rank, "failed");
      EXPECT_THAT(text, StartsWith(place));
      EXPECT_THAT(text, ContainsRegex(words));
    }
  }
  void expect_death_seen(const std::string& place) {
    job_->rank(kOdd).await_output("harm");
    // A peer that failed first may have ended before the other looks.
    expect_failures(place, after_death(), "ranks? (0 and )?1( and 2)? died");
  }
  void expect_stopped() {
    job_->rank(kOdd).await_output("harm");
    const auto path =
        "/proc/" + std::to_string(job_->rank(kOdd).pid()) + "/status";
    const auto deadline = Deadline::after(seconds(10));
    while (!deadline.expired() &&
           read_file(path).find("State:\tT") == std::string::npos) {
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  Job* job_ = nullptr;
};

class Backward : public Training {
 protected:
  // Sizes of a parameter. In shared memory all ranks reduce a bucket from
  // copies or in slices, depending on its size
  // (comm/shm/protocol/bucket_exchange.h), and large gradients may be computed
  // in the buckets.
  std::vector<std::string> sizes() const {
    if (!in_memory() || GetParam().detail) return {"elements=1000"};
    return {"elements=1000", "elements=12000", "elements=100000"};
  }
};

TEST_P(Backward, PeersOfARankKilledInBackwardFailInIt) {
  for (const auto& size : sizes()) {
    SCOPED_TRACE(size);
    auto arguments = dying();
    arguments.push_back(size);
    start("kill", arguments);
    expect_death_seen("backward 3: ");
  }
}

TEST_P(Backward, ARankStoppedInBackwardIsNamedAtTheDeadline) {
  for (const auto& size : sizes()) {
    SCOPED_TRACE(size);
    auto& job = start("stop", {size, "timeout=1200", "together=1"});
    job.rank(kOdd).await_output("harm");
    expect_failures("backward 3: ", seconds(10), names() ? odd_rank() : "");
    for (int rank : {0, 2}) {
      EXPECT_THAT(job.said(rank, "failed"), Not(HasSubstr(" died")));
    }
  }
}

TEST_P(Backward, ARankThatGoesOnBeforeTheDeadlineIsWaitedFor) {
  for (const auto& size : sizes()) {
    SCOPED_TRACE(size);
    auto& job = start("stop", {size, "end=1"});
    expect_stopped();
    std::this_thread::sleep_for(milliseconds(300));  // the pause
    job.rank(kOdd).signal(SIGCONT);
    job.await("done");
  }
}

// All ranks give up the same step, after publishing different numbers of
// buckets.
TEST_P(Backward, AStepThatAllRanksGaveUpDoesNotHarmTheNext) {
  for (const auto& size : sizes()) {
    SCOPED_TRACE(size);
    auto& job = start("all_unused", {size, "end=1"});
    job.await("done");
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_THAT(job.said(rank, "caught"),
                  AllOf(HasSubstr("rank " + std::to_string(rank) + ":"),
                        HasSubstr("'w" + std::to_string(rank) + "'")));
    }
  }
}

// The late rank reduces buckets of the step that was given up, while the others
// compute gradients of the next step in the same memory.
TEST_P(Backward, ARankThatGaveUpLateDoesNotHarmTheNextStep) {
  for (const auto& size : sizes()) {
    for (const char* in_place : {"in_place=0", "in_place=1"}) {
      SCOPED_TRACE(size + " " + in_place);
      start("all_unused", {size, "end=1", "late=300", in_place}).await("done");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Backward,
                         ::testing::Values(kOneHost, kOneHostDetail, kGloo),
                         way_name);

class Losses : public Training {};
class Checks : public Training {};

TEST_P(Losses, PeersOfARankThatDiesBeforeItsFirstStepFailInBackward) {
  start("kill_first", dying());
  expect_death_seen("backward 0: ");
}

TEST_P(Losses, PeersOfARankThatDiesBeforeBucketsAreMadeFailInForward) {
  start("kill_rebuild", dying());
  expect_death_seen("forward 1: ");
}

TEST_P(Losses, PeersOfARankThatDiesBehindBackwardFailInTheNext) {
  start("kill_update", dying());
  expect_death_seen("backward 4: ");
}

TEST_P(Losses, ARankThatLeavesEarlyIsNamed) {
  start("leave", dying()).rank(kOdd).await_output("done");
  expect_failures("backward 3: ", after_death(),
                  odd_rank() + " has left the group");
}

TEST_P(Losses, ARankThatWaitsElsewhereIsNamedWithWhatItCalled) {
  auto& job = start(
      "barrier", {names() ? "timeout=300000" : "timeout=1500", "together=1"});
  job.rank(kOdd).await_output("harm");
  job.await("failed", -1, seconds(10));
  expect_failures("backward 3: ", seconds(10), names() ? "barrier #" : "");
}

TEST_P(Checks, UnevenInputsUnderJoinAreTrainedOn) {
  start("joined", {"end=1"}).await("done");
}

TEST_P(Losses, AMissingGradientOnOneRankNamesItAndThatRank) {
  auto given = dying();
  given.push_back("leave=1");
  auto& job = start("unused", given);
  job.rank(kOdd).await_output("failed");
  EXPECT_THAT(job.said(kOdd, "failed"),
              AllOf(StartsWith("backward 3: "), HasSubstr(odd_rank() + ":"),
                    HasSubstr("'w2'"), HasSubstr("find_unused_parameters")));
  job.rank(kOdd).await_output("left");
  expect_failures("backward 3: ", after_death());
}

TEST_P(Checks, ANanIsNamedOnEveryRankAndTheStepCanBeLeftOut) {
  auto& job = start("nan", {"check_nan=1", "end=1"});
  job.await("done");
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(job.all_said(rank, "caught"),
                ::testing::ElementsAre(AllOf(
                    HasSubstr("'w4'"), HasSubstr("on " + odd_rank() + " "),
                    HasSubstr("NaN"), HasSubstr("step 3"))));
  }
}

TEST_P(Checks, ANanOfAStepThatWasGivenUpIsForgotten) {
  start("all_unused", {"check_nan=1", "spoil=1", "end=1"}).await("done");
}

TEST_P(Checks, AReplicaThatDriftedIsNamedOnEveryRank) {
  auto& job = start("drift", {"check_replicas=2"});
  job.await("failed");
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(job.said(rank, "failed"),
                AllOf(StartsWith("forward 4: "), HasSubstr("'w4'"),
                      HasSubstr("of " + odd_rank() + " ")));
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Losses,
                         ::testing::Values(kOneHost, kGloo, kGlooDetail),
                         way_name);
INSTANTIATE_TEST_SUITE_P(Ways, Checks, ::testing::Values(kOneHost, kGloo),
                         way_name);

std::set<std::string> names_in_dev_shm() {
  std::set<std::string> names;
  for (const auto& file : fs::directory_iterator("/dev/shm")) {
    const auto name = file.path().filename().string();
    if (name.find("lockstep") != name.npos) names.insert(name);
  }
  return names;
}

// Trains with a sharded optimizer and parameters in shared memory.
class SharedParameters : public Training {
 protected:
  SharedParameters() : names_(names_in_dev_shm()) {}

  void start_and_lose(const std::string& scenario, const std::string& place) {
    start(scenario, {"zero=1", "leave=1", "end=1"});
    expect_death_seen(place);
    job_->rank(kOdd).finish();
    for (int rank : {0, 2}) {
      const auto result = job_->rank(rank).finish();
      EXPECT_EQ(result.exit_code, 1) << result.err;
      EXPECT_THAT(result.err, Not(HasSubstr("terminate")));
    }
    EXPECT_TRUE(await_no_process(seconds(5)));
    EXPECT_EQ(names_in_dev_shm(), names_);
  }

 private:
  std::set<std::string> names_;
};

TEST_P(SharedParameters, OfARankKilledInBackward) {
  start_and_lose("kill", "backward 3: ");
}

TEST_P(SharedParameters, OfARankKilledBehindBackwardFailTheStep) {
  start_and_lose("kill_update", "step 3: ");
}

// The next forward waits for ranks that still step.
TEST_P(SharedParameters, OfARankKilledInItsStepFailTheNextForward) {
  start_and_lose("kill_step", "forward 4: ");
}

// The rank that owns a gradient may still be adding up the gradients of the
// others, while these are done and zero theirs in place.
TEST_P(SharedParameters, GradientsMayBeZeroedWhereTheStepIsLeftOut) {
  for (const char* size : {"elements=12000", "elements=100000"}) {
    for (const char* in_place : {"in_place=0", "in_place=1"}) {
      SCOPED_TRACE(std::string(size) + " " + in_place);
      start("skip_step", {"zero=1", in_place, size, "steps=200", "end=1"})
          .await("done");
    }
  }
}

TEST_P(SharedParameters, AreTrainedOnBehindAPause) {
  auto& job = start("stop", {"zero=1", "end=1"});
  expect_stopped();
  std::this_thread::sleep_for(milliseconds(300));  // the pause
  job.rank(kOdd).signal(SIGCONT);
  job.await("done");
}

INSTANTIATE_TEST_SUITE_P(Ways, SharedParameters, ::testing::Values(kOneHost),
                         way_name);

}  // namespace
}  // namespace lockstep::internal::testing
