// Tests how a test's output reports failures in ranks and in Python peers.

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/harness/python_peer.h"
#include "tests/harness/running_program.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ProcessWorld : public testing::ProgramTest {
 protected:
  testing::ProgramResult run_case(const std::string& filter) {
    return run_program({LOCKSTEP_BIN_DIR "/tests/harness_failing_cases",
                        "--gtest_color=no", "--gtest_filter=" + filter});
  }
};

TEST_F(ProcessWorld, AFailedExpectationNamesRankFileAndLine) {
  auto output = run_case("Failing.Expectation/3");
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_THAT(output.out,
              AllOf(HasSubstr("rank 1 of 3"), HasSubstr("on purpose"),
                    HasSubstr("failing_cases.cpp:")));
  EXPECT_THAT(output.out, Not(HasSubstr("rank 0 of 3")));
}

TEST_F(ProcessWorld, AnExceptionNamesRankAndWords) {
  auto output = run_case("Failing.Exception/3");
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_THAT(output.out,
              AllOf(HasSubstr("rank 2 of 3"), HasSubstr("thrown on purpose")));
}

TEST_F(ProcessWorld, ADeadRankIsNamedWithItsSignalOrCode) {
  auto crash = run_case("Failing.Crash/3");
  EXPECT_EQ(crash.exit_code, 1);
  EXPECT_THAT(crash.out, HasSubstr("rank 0 of 3 was killed by signal 11"));
  auto exit = run_case("Failing.Exit/3");
  EXPECT_EQ(exit.exit_code, 1);
  EXPECT_THAT(exit.out, HasSubstr("rank 0 of 3 exited with code 7"));
}

TEST_F(ProcessWorld, ARankLeftWaitingIsNamedSoonAfterTheFailure) {
  auto output = run_case("Failing.PeerLeftWaiting/2");
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_THAT(output.out,
              AllOf(HasSubstr("rank 0 of 2: "), HasSubstr("leaves its peer"),
                    HasSubstr("rank 1 of 2 was still in the case")));
}

TEST_F(ProcessWorld, TheNextCaseMeetsAFreshWorld) {
  auto output =
      run_case("Failing.Crash/3:Failing.TheNextCaseMeetsAFreshWorld/*");
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_THAT(output.out,
              AllOf(HasSubstr("[       OK ] "
                              "Failing.TheNextCaseMeetsAFreshWorld/2"),
                    HasSubstr("[       OK ] "
                              "Failing.TheNextCaseMeetsAFreshWorld/3")));
}

// Peers that crash in each of their first `crashes` starts.
class PythonPeers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
      GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
    }
    // The crashes of this test are not counted among those of the run.
    const auto report = "xml:" + folder_.file("report.xml");
    if (const char* output = std::getenv("GTEST_OUTPUT")) output_ = output;
    ::setenv("GTEST_OUTPUT", report.c_str(), 1);
  }
  void TearDown() override {
    ::setenv("GTEST_OUTPUT", output_.c_str(), 1);
    if (output_.empty()) ::unsetenv("GTEST_OUTPUT");
  }

  std::string run(int crashes, const std::string& how, int ranks = 0) {
    const auto script =
        "import os, pathlib, sys\n"
        "starts = pathlib.Path(sys.argv[1])\n"
        "number = starts.stat().st_size if starts.exists() else 0\n"
        "with open(starts, 'a') as file: file.write('x')\n"
        "if number < " +
        std::to_string(crashes) + ": " + how + "\nprint('done')\n";
    folder_.write("peer.py", script);
    return testing::run_python_peer(
        {.arguments = {folder_.file("peer.py"), folder_.file("starts")},
         .ranks = ranks,
         .environment = {"TMPDIR=" + folder_.path()}});
  }
  size_t starts() const {
    return testing::read_file(folder_.file("starts")).size();
  }
  std::string recorded() const {
    return testing::read_file(folder_.file("python_crashes.txt"));
  }

  static constexpr const char* kCrash = "os.kill(os.getpid(), 11)";

 private:
  const testing::TemporaryFolder folder_;
  std::string output_;
};

TEST_F(PythonPeers, OneThatCrashesIsStartedAgainAndCounted) {
  EXPECT_EQ(run(1, kCrash), "done\n");
  EXPECT_EQ(starts(), 2);
  EXPECT_THAT(recorded(), HasSubstr("the peer itself crashed (SIGSEGV)"));
}

TEST_F(PythonPeers, SoIsOneUnderTorchrun) {
  EXPECT_THAT(run(1, kCrash, 1), HasSubstr("done"));
  EXPECT_EQ(starts(), 2);
  EXPECT_THAT(recorded(), HasSubstr("the peer itself crashed (SIGSEGV)"));
}

TEST_F(PythonPeers, OneThatCrashesTwiceFailsTheTest) {
  EXPECT_NONFATAL_FAILURE(run(2, kCrash), "the peer itself crashed (SIGSEGV)");
  EXPECT_EQ(starts(), 2);
}

TEST_F(PythonPeers, OneThatThrowsFailsTheTestAtOnce) {
  EXPECT_NONFATAL_FAILURE(run(1, "raise ValueError('wrong')"),
                          "ValueError: wrong");
  EXPECT_EQ(starts(), 1);
  EXPECT_EQ(recorded(), "");
}

}  // namespace
}  // namespace lockstep::internal
