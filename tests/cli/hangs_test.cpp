// `lockstep run --hang-timeout`: ranks that stand still are named, with their
// operation and their stack, and the job begins anew or ends.
#include <gmock/gmock.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kHangingRanks = LOCKSTEP_BIN_DIR "/tests/inspect_ranks";

class Hangs : public NodesTest {
 protected:
  std::vector<std::string> job(int ranks, std::vector<std::string> more) const {
    more.insert(
        more.begin(),
        {"--hang-timeout=1", "--nproc-per-node=" + std::to_string(ranks),
         "--log-dir=" + (scratch() / "logs").string(),
         "--report=" + (scratch() / "report.json").string()});
    return more;
  }
  json report() const {
    return json::parse(read_file(scratch() / "report.json"), nullptr, false);
  }
  // Returns the one failure of the only attempt that failed.
  json only_failure() const {
    const json all = report();
    EXPECT_EQ(all["failed_attempts"].size(), 1u);
    const json& failures = all["failed_attempts"][0]["failures"];
    EXPECT_EQ(failures.size(), 1u) << all.dump(2);
    return failures[0];
  }
  json status_of(const std::string& name) {
    const auto result = run_command({"status", "--json", name});
    return json::parse(result.out, nullptr, false);
  }
  // Waits until rank 0 of the job has made `more` steps from now on.
  void await_steps(const std::string& name, int64_t more) {
    const Deadline deadline = Deadline::after(seconds(20));
    const int64_t first = status_of(name)["workers"][0]["steps"];
    while (status_of(name)["workers"][0]["steps"] < first + more) {
      ASSERT_FALSE(deadline.expired()) << "the training stands still";
      std::this_thread::sleep_for(milliseconds(50));
    }
  }
};

TEST_F(Hangs, TheRankForWhichTheOthersWaitIsNamedWithItsStack) {
  const auto result = run(job(3, {kHangingRanks, "stuck"}),
                          {.environment = {"LOCKSTEP_FLIGHT_DIR="}});
  EXPECT_EQ(result.exit_code, 128 + SIGABRT);
  EXPECT_THAT(
      result.err,
      AllOf(
          ContainsRegex(
              "rank 1 hung: no progress for 1 s: in no operation, the "
              "last one was all_reduce 1 \\(default_pg\\) "
              "[0-9.]+ s ago\n  local rank 1"),
          HasSubstr("\n  killed by SIGABRT (exit code 134)\n"),
          HasSubstr("\n  ranks 0 and 2: in all_reduce 2 (default_pg)\n  in "),
          ContainsRegex("\n  in [^\n]*nanosleep"),
          HasSubstr("\n  what the ranks did last: lockstep inspect flight ")));
  const json failure = only_failure();
  EXPECT_EQ(failure["rank"], 1);
  EXPECT_EQ(failure["hung"], true);
  EXPECT_EQ(failure["kind"], "cause");
  EXPECT_THAT(failure["stack"].dump(), HasSubstr("main +"));
  // Where all threads of the other ranks were, too.
  const json attempt = report()["failed_attempts"][0];
  EXPECT_THAT(read_file(std::string(attempt["stacks"])),
              AllOf(HasSubstr("rank 0, process "),
                    HasSubstr(", in all_reduce 2 (default_pg)\n"),
                    HasSubstr("lockstep::all_reduce(at::Tensor const&"),
                    HasSubstr("rank 2, process ")));
  EXPECT_EQ(attempt["flight_records"].size(), 3u);
  for (const auto& file :
       fs::directory_iterator(std::string(attempt["directory"]))) {
    EXPECT_THAT(file.path().filename().string(),
                Not(ContainsRegex("stacks.*json")));
  }
}

TEST_F(Hangs, AHangUsesARestart) {
  const auto result = run(job(2, {"--max-restarts=1", kHangingRanks, "once"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 1 hung: "), HasSubstr("restart 1 of 1")));
  EXPECT_EQ(only_failure()["rank"], 1);
}

TEST_F(Hangs, AStoppedRankIsNamedAndItsStackIsThatOfItsEnd) {
  auto launcher = start(job(2, {kHangingRanks, "train"}));
  launcher->await_output("ready", 2);
  const auto stopped = marked_processes({"RANK=1"});
  ASSERT_EQ(stopped.size(), 1u);
  kill(stopped[0], SIGSTOP);
  const auto result = launcher->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGABRT);
  EXPECT_THAT(
      result.err,
      AllOf(
          HasSubstr("rank 1 hung: no progress for 1 s: stopped by a signal; a "
                    "moment before in "),
          HasSubstr("\n  killed by SIGABRT (exit code 134)\n  rank 0: in ")));
  EXPECT_THAT(only_failure()["stack"].dump(), HasSubstr("main +"));
}

TEST_F(Hangs, IfAllWaitForEachOtherOneIsNamed) {
  const auto result = run(job(2, {kHangingRanks, "crossed"}));
  EXPECT_EQ(result.exit_code, 128 + SIGABRT);
  EXPECT_THAT(result.err,
              ContainsRegex("rank [01] hung: no progress for 1 s: in "));
  EXPECT_THAT(std::string(only_failure()["message"]),
              ContainsRegex("in recv[^\n]*\nrank [01]: in recv"));
}

// The launcher and all that it has started are stopped for longer than a worker
// may stand still, as when a laptop is closed or a scheduler suspends the job.
TEST_F(Hangs, ATrainingThatGoesOnIsLeftAloneAlsoIfItWasSuspended) {
  auto launcher =
      start(job(2, {"--rdzv-id=suspended", kHangingRanks, "train"}));
  launcher->await_output("ready", 2);
  await_steps("suspended", 200);  // of 5 ms each: longer than the timeout
  const auto all = marked_processes();
  for (const pid_t process : all) kill(process, SIGSTOP);
  std::this_thread::sleep_for(milliseconds(2500));  // the pause
  for (const pid_t process : all) kill(process, SIGCONT);
  await_steps("suspended", 200);
  launcher->signal(SIGTERM);
  const auto result = launcher->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  EXPECT_THAT(result.err, Not(HasSubstr("hung")));
  EXPECT_EQ(report()["failed_attempts"], json::array());
}

TEST_F(Hangs, OtherProgramsTouchAFile) {
  const auto result = run(
      job(2, {"sh", "-c",
              "touch $LOCKSTEP_PROGRESS_FILE; [ $RANK = 1 ] && exec sleep 60; "
              "while :; do touch $LOCKSTEP_PROGRESS_FILE; sleep 0.05; done"}));
  EXPECT_EQ(result.exit_code, 128 + SIGABRT);
  EXPECT_THAT(
      result.err,
      AllOf(HasSubstr("rank 1 hung: no progress for 1 s: its progress "
                      "file was not touched\n"),
            HasSubstr("\n  killed by SIGABRT (exit code 134)\n  rank 0: "
                      "makes progress")));
}

TEST_F(Hangs, ProgramsThatTellNothingAreNotWatchedWhichALineSays) {
  const auto result = run(job(
      1, {"sh", "-c", "sleep 2; echo progress file: $LOCKSTEP_PROGRESS_FILE"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "no worker has told of progress for 1 s"), 1);
  EXPECT_THAT(result.out, HasSubstr("/attempt_0/0/progress\n"));
  // Nor has a worker such a file if nobody looks at it.
  const auto without =
      run({"sh", "-c", "echo \"progress file: $LOCKSTEP_PROGRESS_FILE\""},
          {.environment = {"LOCKSTEP_PROGRESS_FILE=/of/another/launcher"}});
  EXPECT_EQ(without.out, "progress file: \n");
}

TEST_F(Hangs, AWorkerThatHandlesAbortIsKilled) {
  const auto result =
      run(job(1, {"sh", "-c",
                  "trap '' ABRT TERM; touch $LOCKSTEP_PROGRESS_FILE; "
                  "while :; do sleep 60; done"}));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 0 hung: no progress"),
                    HasSubstr("\n  killed by SIGKILL (exit code 137)\n")));
  // Nor is it a success if it ends as if it were well.
  EXPECT_EQ(run(job(1, {"sh", "-c",
                        "trap 'exit 0' ABRT; touch $LOCKSTEP_PROGRESS_FILE; "
                        "sleep 60 & wait"}))
                .exit_code,
            128 + SIGABRT);
}

class HangingNodes : public Hangs {
 protected:
  // Runs two nodes of one rank each; rank 1, on node 1, does not come to a
  // collective. Returns what the launchers say.
  std::vector<std::string> run_two(const std::vector<std::string>& second) {
    std::vector<std::unique_ptr<RunningProgram>> nodes;
    for (int node = 0; node < 2; ++node) {
      const auto options =
          with(fixed(port(), 2, node), node == 0 ? kOption : second);
      nodes.push_back(start(with(options, {"--log-dir=" + scratch().string(),
                                           kHangingRanks, "stuck"})));
    }
    std::vector<std::string> said;
    for (auto& node : nodes) {
      auto result = node->finish(seconds(60));
      EXPECT_EQ(result.exit_code, 128 + SIGABRT) << result.err;
      said.push_back(std::move(result.err));
    }
    return said;
  }
  const std::vector<std::string> kOption{"--hang-timeout=1"};
};

TEST_F(HangingNodes, TheOneWithTheRankThatDoesNotComeNamesIt) {
  for (const auto& said : run_two(kOption)) {
    EXPECT_THAT(said, HasSubstr("rank 1 hung on node 1 ("));
    EXPECT_THAT(said, Not(HasSubstr("rank 0 hung")));
  }
}

TEST_F(HangingNodes, OneThatOnlyWaitsSaysSo) {
  for (const auto& said : run_two({})) {
    EXPECT_THAT(said, HasSubstr("rank 0 hung on node 0 ("));
    EXPECT_THAT(said, HasSubstr("no progress for 1 s: in all_reduce 2"));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
