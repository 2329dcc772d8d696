// Jobs on simulated GPUs in which a rank dies, throws or stands still: what the
// other ranks do, and what the launcher says (fault 39 of docs/faults.md).

#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/faults/job.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kAborted = 128 + SIGABRT;
const std::string kLeft = "rank 1 left the group because of an error";
const std::string kOverdue =
    "Watchdog caught collective operation timeout: WorkNCCL";

// Without a launcher.
class SimgpuFailingRanks : public FaultsTest {
 protected:
  Job& make(const std::vector<std::string>& environment = {}) {
    Job& job = make_job({"OneHost", "nccl"}, 3);
    job.program = "simgpu_failing_rank";
    job.environment = [environment](int) {
      auto all = environment;
      all.emplace_back("SIMULATED_CUDA_DEVICES=4");
      return all;
    };
    return job;
  }
};

// NCCL notices nothing, so the timeout is over first.
TEST_F(SimgpuFailingRanks, PeersOfAKilledRankAreEndedByTheWatchdog) {
  Job& job = make();
  job.start("trains", {"timeout=6000", "together=1"});
  job.await("ready");
  job.rank(1).signal(SIGKILL);
  for (const int rank : {0, 2}) {
    const auto result = job.rank(rank).finish(seconds(30));
    EXPECT_EQ(result.exit_code, kAborted) << result.err;
    EXPECT_THAT(result.err,
                AllOf(HasSubstr(kOverdue), HasSubstr("Timeout(ms)=6000")));
  }
}

TEST_F(SimgpuFailingRanks, PeersOfARankThatThrewAreEndedWithItsName) {
  Job& job = make();
  job.start("throws", {"odd=1"});
  for (const int rank : {0, 2}) {
    const auto result = job.rank(rank).finish(seconds(30));
    EXPECT_EQ(result.exit_code, kAborted) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr(kLeft), Not(HasSubstr(kOverdue))));
  }
  EXPECT_EQ(job.rank(1).finish().exit_code, 1);
  EXPECT_EQ(job.said(1, "failed"), "no such file: numbers.csv");
}

TEST_F(SimgpuFailingRanks, PeersThatMayGoOnThrowAnErrorThatNamesIt) {
  Job& job = make({"TORCH_NCCL_ASYNC_ERROR_HANDLING=2"});
  job.start("throws", {"odd=1"});
  for (const int rank : {0, 2}) {
    const auto result = job.rank(rank).finish(seconds(30));
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_THAT(job.said(rank, "failed"),
                AllOf(HasSubstr(kLeft), HasSubstr("all_reduce #")));
  }
}

// Each rank sees another device as its own, but two of them are the same GPU.
TEST_F(SimgpuFailingRanks, TwoRanksOnOneGpuAreRefusedInOneLine) {
  Job& job = make();
  job.environment = [](int rank) {
    std::vector<std::string> all{"SIMULATED_CUDA_DEVICES=4"};
    all.emplace_back(rank == 2 ? "CUDA_VISIBLE_DEVICES=3,2,0"
                               : "CUDA_VISIBLE_DEVICES=0,1,2");
    return all;
  };
  job.start("trains");
  for (int rank = 0; rank < 3; ++rank) {
    const auto result = job.rank(rank).finish(seconds(30));
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_THAT(job.said(rank, "failed"),
                AllOf(HasSubstr("Duplicate GPU detected : rank 2 and rank 0"),
                      Not(HasSubstr(" | "))));
  }
}

class SimgpuFailingJobs : public LauncherTest {
 protected:
  std::unique_ptr<RunningProgram> start_job(
      const std::vector<std::string>& options,
      const std::vector<std::string>& arguments) {
    std::vector<std::string> command{"--standalone", "--nproc-per-node=2"};
    command.insert(command.end(), options.begin(), options.end());
    command.emplace_back(LOCKSTEP_BIN_DIR "/tests/simgpu_failing_rank");
    command.insert(command.end(), arguments.begin(), arguments.end());
    return start(command, {.environment = {"OMP_NUM_THREADS=1"}});
  }
};

TEST_F(SimgpuFailingJobs, TheRankThatThrewIsNamedFirst) {
  // If the watchdog ends rank 0 before the launcher does, there is a report.
  const auto job = start_job({"--log-dir=" + scratch().string()},
                             {"throws", "nccl", "odd=1"});
  const auto result = job->finish(seconds(60));
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, AllOf(HasSubstr("lockstep run: rank 1 failed: "),
                                Not(HasSubstr("lockstep run: rank 0 failed"))));
}

TEST_F(SimgpuFailingJobs, AKilledRankIsNamedBeforeAWatchdogNoticesIt) {
  const auto job = start_job({}, {"trains", "nccl"});
  job->await_output("ready 0");
  job->await_output("ready 1");
  // The watchdogs have five minutes.
  const auto ranks = marked_processes({"RANK=1"});
  ASSERT_EQ(ranks.size(), 1U);
  ::kill(ranks.front(), SIGKILL);
  const auto result = job->finish(seconds(60));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(result.err, HasSubstr("lockstep run: rank 1 failed: "));
}

// Rank 0 is ended by its watchdog, although rank 1 stands still. The launcher
// names the operation, and starts the ranks again.
TEST_F(SimgpuFailingJobs, AWatchdogsEndIsNamedAndTheRanksStartAgain) {
  const auto job = start_job({"--max-restarts=1"},
                             {"stands", "nccl", "odd=1", "timeout=8000"});
  const auto result = job->finish(seconds(60));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("lockstep run: rank 0 failed: "),
                    HasSubstr(kOverdue), HasSubstr("OpType=ALLREDUCE"),
                    HasSubstr("killed by SIGABRT (exit code 134)")));
  for (const char* rank : {"done 0\n", "done 1\n"}) {
    EXPECT_EQ(count(result.out, rank), 1) << result.out;
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
