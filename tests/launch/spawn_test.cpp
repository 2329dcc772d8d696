// spawn() in a program without LibTorch (spawn_program.cpp).
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <map>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

class Spawn : public LauncherTest {
 protected:
  static std::vector<std::string> command(
      const std::vector<std::string>& arguments) {
    std::vector<std::string> all{LOCKSTEP_BIN_DIR "/tests/spawn_program"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return all;
  }
  ProgramResult spawned(const std::vector<std::string>& arguments,
                        ProgramSetup setup = {}) {
    return run_program(command(arguments), std::move(setup));
  }
  // Returns the path for a Gate of the program.
  std::string gate() {
    std::filesystem::create_directories(scratch());
    return scratch() / "gate";
  }
};

TEST_F(Spawn, RanksFindTheEnvironmentOfWorkersAndTheirArguments) {
  const auto result =
      spawned({"environment", "2", "", "two words"},
              {.environment = {"KEPT=yes"}, .input = "of the parent"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto line = [](const std::string& rank, const std::string& socket) {
    return "rank " + rank + "<2><><two words> RANK=" + rank +
           " LOCAL_RANK=" + rank +
           " WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"
           " OMP_NUM_THREADS=1 TORCHELASTIC_USE_AGENT_STORE=False"
           " TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_ERROR_FILE=(unset)"
           " KEPT=yes port " +
           socket + " no input";
  };
  EXPECT_THAT(lines(result.out),
              UnorderedElementsAre(line("0", "socket"), line("1", "no socket"),
                                   "joined"));
}

TEST_F(Spawn, OmpThreadsAreLeftToOneProcessAndToTheUser) {
  EXPECT_THAT(spawned({"environment", "1"}).out,
              HasSubstr("OMP_NUM_THREADS=(unset)"));
  EXPECT_THAT(
      spawned({"environment", "2"}, {.environment = {"OMP_NUM_THREADS=3"}}).out,
      HasSubstr("OMP_NUM_THREADS=3"));
}

TEST_F(Spawn, WorldUnderALauncherIsItsOwn) {
  const auto result =
      run({"--nproc-per-node=2", "--max-restarts=1", command({})[0],
           "environment", "3"},
          {.environment = {"TORCHELASTIC_USE_AGENT_STORE=True"}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "joined\n"), 2);
  EXPECT_EQ(count(result.out, " WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 "), 6);
  for (const char* rank : {"0", "1", "2"}) {
    EXPECT_EQ(count(result.out, std::string(" RANK=") + rank), 2) << result.out;
  }
  EXPECT_EQ(count(result.out, "TORCHELASTIC_USE_AGENT_STORE=False"), 6);
  EXPECT_EQ(count(result.out, "TORCHELASTIC_ERROR_FILE=(unset)"), 6);
  EXPECT_EQ(count(result.out, " port socket "), 2);
  EXPECT_EQ(count(result.out, " port no socket "), 4) << result.out;
}

TEST_F(Spawn, RankThatReturnsFlushesAndDestroysStatics) {
  EXPECT_EQ(spawned({"statics"}).out, "buffered, static destroyed\n");
}

TEST_F(Spawn, DescriptorsOfTheParentAreNotInherited) {
  EXPECT_EQ(spawned({"descriptors"}).out, "closed\n");
}

TEST_F(Spawn, ArgumentsThatMakeNoSenseAreRefused) {
  EXPECT_EQ(spawned({"bad-arguments"}).out,
            "what: spawn: nprocs is 0; it must be at least 1\n"
            "what: spawn: nprocs is -3; it must be at least 1\n"
            "what: spawn: fn is empty; give a function that takes the rank\n"
            "what: spawn: grace_period is 0 ms; give more than 0, or none for "
            "SIGTERM at once\n");
}

// Rank 1 of 3 fails while the others would stay for a minute.
TEST_F(Spawn, FirstFailureIsRethrownWithItsRank) {
  const std::string start =
      "what: spawn\\(\\) at spawn_program.cpp:[0-9]+: rank 1 of 3 "
      "\\(pid [0-9]+\\) ";
  const struct {
    std::vector<std::string> action;
    std::string fields;
    std::string text;
  } cases[]{
      {{"throw"},
       "SpawnError rank 1 exit code 1 signal none gone\n",
       "threw std::invalid_argument: no such file\n"},
      {{"throw-int"},
       "SpawnError rank 1 exit code 1 signal none gone\n",
       "threw int, which is not a std::exception\n"},
      {{"exit", "3"},
       "SpawnError rank 1 exit code 3 signal none gone\n",
       "ended with exit code 3\n"},
      {{"signal", std::to_string(SIGABRT)},
       "SpawnError rank 1 exit code 134 signal 6 gone\n",
       "was killed by SIGABRT\n"},
      {{"signal", std::to_string(SIGKILL)},
       "SpawnError rank 1 exit code 137 signal 9 gone\n",
       "was killed by SIGKILL\n"},
      {{"spawn"},
       "SpawnError rank 1 exit code 1 signal none gone\n",
       "threw std::invalid_argument: spawn\\(\\) at spawn_program.cpp:[0-9]+ "
       "was called in rank 1 of spawn\\(\\) at spawn_program.cpp:[0-9]+; "
       "spawned processes cannot spawn: start all from the first process\n"},
  };
  for (const auto& one : cases) {
    auto arguments = one.action;
    arguments.insert(arguments.begin(), "fail");
    const auto result = spawned(arguments);
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_THAT(result.out, HasSubstr(one.fields));
    EXPECT_THAT(result.out, ContainsRegex(start + one.text));
    EXPECT_THAT(result.out, Not(HasSubstr("never")));
  }
}

TEST_F(Spawn, LongExceptionIsCut) {
  const auto result = spawned({"fail", "throw-much"});
  EXPECT_THAT(result.out, HasSubstr("xxx ...\n"));
  EXPECT_GT(result.out.size(), 32 * 1024u);
  EXPECT_LT(result.out.size(), 34 * 1024u);
}

TEST_F(Spawn, FirstFailureIsNamedNotItsEcho) {
  const auto result = spawned({"echo", gate()});
  EXPECT_THAT(result.out, AllOf(HasSubstr("SpawnError rank 1"),
                                HasSubstr("std::runtime_error: the cause")));
}

TEST_F(Spawn, OfTwoFoundDeadTheEarlierExceptionOrTheSignalIsNamed) {
  EXPECT_THAT(spawned({"both-fail", gate(), "0"}).out,
              HasSubstr("rank 1 exit code 1 signal none"));
  EXPECT_THAT(
      spawned({"both-fail", gate(), std::to_string(SIGABRT)}).out,
      HasSubstr("rank 0 exit code 134 signal " + std::to_string(SIGABRT)));
}

// The connections close while the cause still unwinds out of fn.
TEST_F(Spawn, EchoThatComesBeforeItsCauseIsNotNamed) {
  for (const char* how : {"exception", "signal"}) {
    EXPECT_THAT(spawned({"echo-first", gate(), how}).out,
                AllOf(HasSubstr("SpawnError rank 1"),
                      HasSubstr("std::runtime_error: the cause\n")));
  }
  EXPECT_THAT(spawned({"echo-first", gate(), "alone"}).out,
              AllOf(HasSubstr("SpawnError rank 0"),
                    HasSubstr("c10::DistBackendError: connection closed")));
}

// A bug: the rank that threw catches its exception, prints and leaves, and a
// victim was named.
TEST_F(Spawn, RankThatTheVictimsNameIsTheCause) {
  const std::map<std::string, std::vector<std::string>> ways{
      {"exits",
       {"SpawnError rank 1 exit code 3 ", "ended with exit code 3; others ",
        "needed it: rank 0 threw c10::DistBackendError: rank 1 has left"}},
      {"returns",
       {"SpawnError rank 1 exit code 0 ",
        "ended with exit code 0 after fn had returned; others needed it: "}},
      {"stays",
       {"SpawnError rank 1 ",
        "left its group, and was stopped while it was "
        "ending; others needed it: "}},
      {"caught",
       {"SpawnError rank 1 exit code 3 ",
        "; others needed it: rank 0 ended with exit code 5 after all_reduce #5 "
        "failed: rank 1 has left the group\n"}}};
  for (const auto& [how, words] : ways) {
    const std::string out = spawned({"echo-first", gate() + how, how}).out;
    for (const auto& one : words) EXPECT_THAT(out, HasSubstr(one));
  }
}

TEST_F(Spawn, ExitZeroIsSuccess) {
  EXPECT_EQ(spawned({"exit-zero"}).out, "success\n");
}

TEST_F(Spawn, CrashOfAStaticIsSaidToBeOne) {
  EXPECT_THAT(spawned({"crash-at-exit"}).out,
              HasSubstr("was killed by SIGABRT after fn had returned, while "
                        "its statics were destroyed\n"));
}

TEST_F(Spawn, ProgramThatEndsBeforeTheCallHasFailed) {
  for (const char* code : {"0", "4"}) {
    const auto result = spawned({"end-before", code});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.out, HasSubstr(std::string("exit code ") + code));
    EXPECT_THAT(result.out,
                ContainsRegex(
                    "rank [01] of 2 \\(pid [0-9]+\\) ended with exit code " +
                    std::string(code) +
                    " without reaching this call; each spawned process runs "
                    "main\\(\\) again, and the code before the call must lead "
                    "it there\n"));
  }
}

TEST_F(Spawn, ProgramThatComesToAnotherCallIsToldSo) {
  EXPECT_THAT(spawned({"other-call"}).out,
              ContainsRegex("\\(pid [0-9]+\\) came to spawn\\(\\) at "
                            "spawn_program.cpp:[0-9]+ instead; each spawned "
                            "process must make the same spawn\\(\\) calls in "
                            "the same order\n"));
}

TEST_F(Spawn, ProgramThatClosesWhatItDidNotOpenIsToldSo) {
  const auto result = spawned({"close-report"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.out,
      ContainsRegex("what: spawn: this process was spawned, but has "
                    "closed descriptor [0-9]+, which carries its report; "
                    "do not close what the program did not open\n"));
}

TEST_F(Spawn, ProgramThatCannotBeExecutedAgainIsNamed) {
  std::filesystem::create_directories(scratch());
  const std::string copy = scratch() / "copy";
  std::filesystem::copy_file(command({})[0], copy);
  const auto result = run_program({copy, "cannot-execute", copy});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.out, "what: spawn: executing this program (" + copy +
                            ") again as rank 0: Permission denied\n");
}

TEST_F(Spawn, OthersAreTerminatedThenKilled) {
  EXPECT_THAT(spawned({"grace", gate(), "clean"}).out,
              AllOf(HasSubstr("cleaned up\n"), HasSubstr("SpawnError rank 1")));
  EXPECT_THAT(spawned({"grace", gate(), "stubborn"}).out,
              HasSubstr("SpawnError rank 1"));
}

TEST_F(Spawn, GracePeriodLetsOthersEndByThemselves) {
  EXPECT_THAT(
      spawned({"grace", gate(), "by-itself", "20000"}).out,
      AllOf(HasSubstr("done by itself\n"), HasSubstr("SpawnError rank 1")));
  EXPECT_THAT(spawned({"grace", gate(), "stubborn", "50"}).out,
              HasSubstr("SpawnError rank 1"));
}

TEST_F(Spawn, ContextIsJoinedWithATimeoutAndMoves) {
  const auto result = spawned({"context", gate()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(lines(result.out),
              UnorderedElementsAre("2 processes", "not yet", "not yet",
                                   "nothing left behind", "rank 0 passed",
                                   "rank 1 passed", "joined"));
}

TEST_F(Spawn, ContextThrowsItsErrorEachTime) {
  EXPECT_EQ(count(spawned({"context-error"}).out,
                  "SpawnError rank 1 exit code 5 signal none gone\n"),
            2);
}

TEST_F(Spawn, EndOfAContextKills) {
  EXPECT_EQ(spawned({"drop"}).out, "dropped\n");
}

TEST_F(Spawn, ProcessesOutliveTheThreadThatSpawnedThem) {
  EXPECT_EQ(spawned({"thread-that-ends", gate()}).out, "joined\n");
}

TEST_F(Spawn, ProgramWithThreadsSpawns) {
  const auto result = spawned({"threads"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(count(result.out, "rank 0\n"), 5);
  EXPECT_EQ(count(result.out, "rank 1\n"), 5);
}

TEST_F(Spawn, EachCallRunsItsOwnFunction) {
  const auto result = spawned({"two-calls"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(count(result.out, "first 0\n"), 1);
  EXPECT_EQ(count(result.out, "first 1\n"), 1);
  EXPECT_EQ(count(result.out, "second 0\n"), 1);
  EXPECT_EQ(count(result.out, "exit code 6"), 2) << result.out;
  EXPECT_EQ(count(result.out, "fourth 0\n"), 1);
  EXPECT_EQ(count(result.out, "fourth 1\n"), 1);
  // Ranks of the third and the fourth call skip the second.
  EXPECT_EQ(count(result.out, "empty in a rank of a later call\n"), 3);
  EXPECT_EQ(count(result.out, "end\n"), 1);
}

TEST_F(Spawn, OtherChildrenAreLeftToTheirOwner) {
  EXPECT_EQ(spawned({"other-children"}).out, "the other child is mine\n");
}

TEST_F(Spawn, WhereChildrenAreIgnoredTheReportDecides) {
  EXPECT_THAT(spawned({"ignored-children"}).out,
              AllOf(HasSubstr("success\n"),
                    HasSubstr("SpawnError rank 0 exit code -1 signal none"),
                    HasSubstr("ended, and other code of this process took its "
                              "exit code")));
}

TEST_F(Spawn, KilledParentLeavesNoProcess) {
  for (const int signal : {SIGKILL, SIGTERM, SIGABRT}) {
    auto program = start_program(command({"interrupted"}));
    program->await_output("ready\n", 3);
    EXPECT_EQ(marked_processes().size(), 4u);
    program->signal(signal);
    EXPECT_EQ(program->finish().exit_code, 128 + signal);
    EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
  }
}

TEST_F(Spawn, KilledParentLeavesNoProcessThatHasNotReachedTheCall) {
  auto program = start_program(command({"interrupted", "early"}));
  program->await_output("ready\n", 3);
  program->signal(SIGKILL);
  EXPECT_EQ(program->finish().exit_code, 128 + SIGKILL);
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

TEST_F(Spawn, InterruptOfTheTerminalReachesAll) {
  auto program = start_program(command({"interrupted"}));
  program->await_output("ready\n", 3);
  kill(-program->pid(), SIGINT);  // to the process group, as a terminal does
  EXPECT_EQ(program->finish().exit_code, 128 + SIGINT);
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

TEST_F(Spawn, InterruptThatTheParentHandlesEndsInAnError) {
  auto program = start_program(command({"interrupted", "handled"}));
  program->await_output("ready\n", 3);
  kill(-program->pid(), SIGINT);
  const auto result = program->finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, ContainsRegex("rank [0-2] of 3 \\(pid [0-9]+\\) was "
                                        "killed by SIGINT\n"));
}

}  // namespace
}  // namespace lockstep::internal::testing
