// Fault 25: signals that end a training at a step on which all ranks agree.
#include <gmock/gmock.h>
#include <signal.h>

#include <set>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class StopRequest : public LauncherTest {
 protected:
  std::unique_ptr<RunningProgram> start_ranks(
      int ranks, const std::string& scenario,
      std::vector<std::string> options = {}) {
    options.push_back("--nproc-per-node=" + std::to_string(ranks));
    options.push_back(LOCKSTEP_BIN_DIR "/tests/comm_stop_rank");
    options.push_back(scenario);
    auto job = start(options);
    if (scenario != "asked") job->await_output("ready ", ranks);
    return job;
  }
  // Returns the last word of each line "WORD RANK ...".
  static std::multiset<std::string> said(const std::string& out,
                                         const std::string& word) {
    std::multiset<std::string> all;
    for (const auto& line : lines(out)) {
      if (line.starts_with(word + " ")) {
        all.insert(line.substr(line.rfind(' ') + 1));
      }
    }
    return all;
  }
  // Expects that so many ranks have stopped, all after the same step.
  static void expect_one_step(const std::string& out, int ranks) {
    const auto steps = said(out, "stopped");
    EXPECT_THAT(steps, SizeIs(ranks)) << out;
    EXPECT_EQ(std::set(steps.begin(), steps.end()).size(), 1u) << out;
  }
};

TEST_F(StopRequest, AForwardedSignalStopsAllRanksAfterTheSameStep) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) {
    auto job = start_ranks(3, "train");
    job->signal(signal);
    const auto result = job->finish();
    EXPECT_EQ(result.exit_code, 128 + signal) << result.err;
    expect_one_step(result.out, 3);
  }
}

// As Slurm's --signal=USR1@120 sends it. It writes flight records otherwise.
TEST_F(StopRequest, TheSignalsAreThoseThatTheLauncherIsToldToHandle) {
  auto job = start_ranks(2, "train", {"--signals-to-handle=SIGUSR1"});
  job->signal(SIGUSR1);
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGUSR1) << result.err;
  expect_one_step(result.out, 2);
}

// As a scheduler does that knows only of one process.
TEST_F(StopRequest, ASignalToOneRankStopsAll) {
  auto job = start_ranks(3, "train", {"--failure-shutdown-timeout=20"});
  const auto pids = said(job->out(), "ready");
  kill(std::stoi(*pids.begin()), SIGTERM);
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  expect_one_step(result.out, 3);
}

TEST_F(StopRequest, AProgramMayAskForItself) {
  auto job = start_ranks(2, "asked", {"--failure-shutdown-timeout=20"});
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_EQ(count(result.out, "stopped 0 20\n"), 1) << result.out;
  EXPECT_EQ(count(result.out, "stopped 1 20\n"), 1) << result.out;
}

TEST_F(StopRequest, AHandlerOfTheProgramStays) {
  auto job = start_ranks(2, "handler");
  job->signal(SIGTERM);
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  expect_one_step(result.out, 2);
  EXPECT_EQ(count(result.out, "own 0 1\n"), 1) << result.out;
  EXPECT_EQ(count(result.out, "own 1 1\n"), 1) << result.out;
}

TEST_F(StopRequest, AChildThatWasForkedEndsAtTheSignal) {
  auto job = start_ranks(2, "child");
  job->signal(SIGINT);
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_THAT(result.out, ::testing::ContainsRegex("child 0 (2|15)\n"));
}

TEST_F(StopRequest, WithoutAGroupTheProcessStopsForItself) {
  auto program =
      start_program({LOCKSTEP_BIN_DIR "/tests/comm_stop_rank", "alone"});
  program->await_output("ready ");
  program->signal(SIGTERM);
  const auto result = program->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.out, HasSubstr("stopped 0 "));
}

// Whether a process catches a signal, by /proc/PID/status.
bool catches(pid_t pid, int signal) {
  const std::string status =
      read_file("/proc/" + std::to_string(pid) + "/status");
  const std::string key = "SigCgt:\t";
  const auto mask =
      std::stoull(status.substr(status.find(key) + key.size()), nullptr, 16);
  return (mask >> (signal - 1) & 1) != 0;
}

TEST_F(StopRequest, ASecondCtrlCEndsAProgramThatDoesNotStop) {
  auto program =
      start_program({LOCKSTEP_BIN_DIR "/tests/comm_stop_rank", "once"});
  program->await_output("ready ");
  for (const int signal : {SIGTERM, SIGTERM, SIGINT}) program->signal(signal);
  const Deadline deadline = Deadline::after(seconds(20));
  while (catches(program->pid(), SIGINT) && !deadline.expired()) {
    std::this_thread::sleep_for(milliseconds(2));
  }
  EXPECT_TRUE(catches(program->pid(), SIGTERM));
  program->signal(SIGINT);
  EXPECT_EQ(program->finish().exit_code, 128 + SIGINT);
}

}  // namespace
}  // namespace lockstep::internal::testing
