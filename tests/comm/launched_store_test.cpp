// Ranks that `lockstep run` starts, and the store at which they meet: that of
// the launcher, or rank 0's TCPStore for those that Python ranks may join.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kRank = LOCKSTEP_BIN_DIR "/tests/comm_launched_rank";

class LaunchedStore : public NodesTest {
 protected:
  // Returns the launcher's arguments for `ranks` ranks.
  static std::vector<std::string> ranks(
      int count, const std::string& scenario, const std::string& backend,
      const std::vector<std::string>& more = {},
      std::vector<std::string> options = {}) {
    options.push_back("--nproc-per-node=" + std::to_string(count));
    options.push_back(kRank);
    options.push_back(scenario);
    options.push_back(backend);
    return with(options, more);
  }
  // Returns the launcher's arguments for two ranks that run by `script`, in
  // which $PROGRAM is the rank's program.
  static std::vector<std::string> scripted(
      const std::string& script, std::vector<std::string> options = {}) {
    options.push_back("--nproc-per-node=2");
    return with(options, {"sh", "-c", "PROGRAM=" + kRank + "; " + script});
  }
  static constexpr seconds kLong{100};
};

TEST_F(LaunchedStore, RanksOfOneHostMeetWithoutAPort) {
  const auto result = start(ranks(3, "sum", "lockstep"))->finish(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, " is silent\n"), 3) << result.out;
  EXPECT_EQ(count(result.out, " is 3\n"), 6) << result.out;
}

// The default backend of ranks that do not share memory is Gloo's.
TEST_F(LaunchedStore, RanksOfTwoNodesMeetWithoutAPort) {
  std::vector<std::unique_ptr<RunningProgram>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(start(
        ranks(2, "sum", "lockstep", {"joins=2"}, meeting(endpoint(), 2, node)),
        {.environment = {"LOCKSTEP_HOST_ID=node" + std::to_string(node)}}));
  }
  for (const auto& node : nodes) {
    const auto result = node->finish(kLong);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.out, " is silent\n"), 4) << result.out;
    EXPECT_EQ(count(result.out, " is 6\n"), 8) << result.out;
  }
}

TEST_F(LaunchedStore, EveryAttemptOfTwoNodesHasAFreshOne) {
  std::vector<std::unique_ptr<RunningProgram>> nodes;
  for (const int node : {0, 1}) {
    nodes.push_back(
        start(ranks(1, "restarts", "lockstep", {"odd=1"},
                    with(meeting(endpoint(), 2, node), {"--max-restarts=1"}))));
  }
  for (const auto& node : nodes) {
    const auto result = node->finish(kLong);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.out, "done "), 1) << result.out;
  }
}

TEST_F(LaunchedStore, BackendsThatPythonHasMeetAtRankZero) {
  const auto result = start(ranks(2, "sum", "gloo"))->finish(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, " listens\n"), 2) << result.out;
}

TEST_F(LaunchedStore, OptionDecidesWhateverTheBackend) {
  auto result = start(ranks(2, "sum", "gloo", {}, {"--worker-store=agent"}))
                    ->finish(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, " is silent\n"), 2) << result.out;
  EXPECT_EQ(count(result.out, " is 1\n"), 4) << result.out;
  result = start(ranks(2, "sum", "lockstep", {}, {"--worker-store=tcp"}))
               ->finish(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, " listens\n"), 2) << result.out;
}

TEST_F(LaunchedStore, ProgramMayJoinAgainAndAnotherMayFollowIt) {
  for (const char* backend : {"lockstep", "gloo"}) {
    SCOPED_TRACE(backend);
    const std::string once = "$PROGRAM sum " + std::string(backend);
    const auto result =
        start(scripted(once + " joins=3 && " + once + " && " + once))
            ->finish(kLong);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.out, " is 1\n"), 20) << result.out;
  }
  // From one store to the other.
  const auto result =
      start(scripted("$PROGRAM sum gloo && $PROGRAM sum lockstep && "
                     "$PROGRAM sum gloo"))
          ->finish(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, " is 1\n"), 12) << result.out;
}

// A program may make a world of its own from some of the workers, or of
// workers of several launchers.
TEST_F(LaunchedStore, AnotherMasterPortIsAnotherWorld) {
  const auto result = start(ranks(2, "elsewhere", "lockstep",
                                  {"port=" + std::to_string(port())}))
                          ->finish(kLong);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, " listens\n"), 2) << result.out;
}

// The waits have five minutes.
TEST_F(LaunchedStore, RanksThatMeetAtDifferentStoresAreRefusedAtOnce) {
  for (const char* odd : {"0", "1"}) {
    SCOPED_TRACE(odd);
    auto launcher = start(scripted(
        "[ $RANK = " + std::string(odd) +
        " ] && "
        "export LOCKSTEP_WORKER_STORE=tcp; exec $PROGRAM sum lockstep"));
    const auto result = launcher->finish(seconds(60));
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.out + result.err,
                HasSubstr("give all ranks the same backend and the same "
                          "--worker-store"));
  }
  // Their backends decide so, too.
  const auto result = start(scripted("[ $RANK = 0 ] && exec $PROGRAM sum gloo; "
                                     "exec $PROGRAM sum lockstep"))
                          ->finish(seconds(60));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out + result.err,
              HasSubstr("give all ranks the same backend"));
}

TEST_F(LaunchedStore, TwoProcessesOfOneRankAreNamedToAll) {
  const auto result = start(ranks(3, "sum", "lockstep", {"odd=2", "rank=1"},
                                  {"--failure-shutdown-timeout=20"}))
                          ->finish(seconds(60));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out,
              ::testing::ContainsRegex(
                  "two processes of this job call themselves rank 1 of 3: pid "
                  "[0-9]+, and pid [0-9]+ on "));
  EXPECT_EQ(count(result.out, "refused "), 3) << result.out;
}

TEST_F(LaunchedStore, WhatInitThrowsIsReportedIfNobodyCatchesIt) {
  const auto result =
      start(ranks(2, "uncaught", "lockstep", {"odd=1", "rank=0", "size=2"},
                  {"--log-dir=" + (scratch() / "logs").string()}))
          ->finish(kLong);
  EXPECT_NE(result.exit_code, 0);
  // In one line of the rank, and in the launcher's report.
  EXPECT_GE(count(result.err, "two processes"), 2) << result.err;
  EXPECT_THAT(result.err, Not(HasSubstr("terminate called")));
}

TEST_F(LaunchedStore, AnotherWorldSizeIsNamedToAll) {
  const auto result = start(ranks(3, "sum", "lockstep", {"odd=1", "size=4"},
                                  {"--failure-shutdown-timeout=20"}))
                          ->finish(seconds(60));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out,
              HasSubstr("start every rank with the same WORLD_SIZE"));
  EXPECT_EQ(count(result.out, "refused "), 3) << result.out;
}

TEST_F(LaunchedStore, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  const auto result = start(scripted("[ $RANK = 1 ] && exec sleep 60; "
                                     "exec $PROGRAM sum lockstep timeout=1500"))
                          ->finish(seconds(60));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("absent: rank 1"));
}

// Rank 0 hosted the store before, and calls that asked it had no deadline.
TEST_F(LaunchedStore, CallsGoOnWhileRankZeroIsStopped) {
  for (const char* odd : {"odd=0", "odd=1"}) {
    SCOPED_TRACE(odd);
    auto launcher = start(ranks(2, "stopped", "lockstep", {odd}));
    const auto result = launcher->finish(seconds(60));
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_EQ(count(result.out, "\nfailed "), 2) << result.out;
    EXPECT_EQ(count(result.out, "done "), 1) << result.out;
    EXPECT_THAT(result.out, HasSubstr("rank " + std::string(odd).substr(4)));
  }
}

TEST_F(LaunchedStore, OptionIsCheckedBeforeAnythingStarts) {
  auto result = run({"--worker-store=both", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("allowed are auto, agent and tcp"));
  const auto script = scratch() / "train.py";
  {
    RunningProgram touch({"/usr/bin/touch", script}, {});
    touch.finish();
  }
  result = run({"--worker-store=agent", script});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("runs under Python"));
  result = run(with(c10d(endpoint(), 2), {"--worker-store=agent", "true"}));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("takes no workers of several nodes"));
}

TEST_F(LaunchedStore, PythonProgramsGetNoneAndNothingOfAnOuterLauncher) {
  const auto script = scratch() / "look.py";
  {
    RunningProgram write(
        {"/bin/sh", "-c",
         "echo 'import os; print(os.environ.get(\"LOCKSTEP_STORE\"))' > " +
             script.string()},
        {});
    write.finish();
  }
  EXPECT_EQ(run({script}, {.environment = {"LOCKSTEP_STORE=outer"}}).out,
            "None\n");
  EXPECT_THAT(run({"sh", "-c", "echo $LOCKSTEP_STORE $MASTER_PORT"}).out,
              ::testing::ContainsRegex(
                  "^lockstep-store/[0-9]+/[0-9]+/[0-9a-f]{8}/0/([0-9]+) "));
}

}  // namespace
}  // namespace lockstep::internal::testing
