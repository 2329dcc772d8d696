// Tests how a test's output reports failures in ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/harness/running_program.h"

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

}  // namespace
}  // namespace lockstep::internal
