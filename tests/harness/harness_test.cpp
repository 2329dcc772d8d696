// How failures in ranks reach the reader of a test's output.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Output {
  std::string text;
  bool passed;
};

Output run_case(const std::string& filter) {
  std::string command =
      LOCKSTEP_BIN_DIR
      "/tests/harness_failing_cases --gtest_color=no --gtest_filter='" +
      filter + "' 2>&1";
  FILE* pipe = ::popen(command.c_str(), "r");
  Output output;
  std::array<char, 4096> buffer;
  while (size_t size = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.text.append(buffer.data(), size);
  }
  output.passed = ::pclose(pipe) == 0;
  return output;
}

TEST(ProcessWorld, AFailedExpectationNamesRankFileAndLine) {
  auto output = run_case("Failing.Expectation/3");
  EXPECT_FALSE(output.passed);
  EXPECT_THAT(output.text,
              AllOf(HasSubstr("rank 1 of 3"), HasSubstr("on purpose"),
                    HasSubstr("failing_cases.cpp:")));
  EXPECT_THAT(output.text, Not(HasSubstr("rank 0 of 3")));
}

TEST(ProcessWorld, AnExceptionNamesRankAndWords) {
  auto output = run_case("Failing.Exception/3");
  EXPECT_FALSE(output.passed);
  EXPECT_THAT(output.text,
              AllOf(HasSubstr("rank 2 of 3"), HasSubstr("thrown on purpose")));
}

TEST(ProcessWorld, ADeadRankIsNamedWithItsSignalOrCode) {
  auto crash = run_case("Failing.Crash/3");
  EXPECT_FALSE(crash.passed);
  EXPECT_THAT(crash.text, HasSubstr("rank 0 of 3 was killed by signal 11"));
  auto exit = run_case("Failing.Exit/3");
  EXPECT_FALSE(exit.passed);
  EXPECT_THAT(exit.text, HasSubstr("rank 0 of 3 exited with code 7"));
}

TEST(ProcessWorld, ARankLeftWaitingIsNamedSoonAfterTheFailure) {
  auto output = run_case("Failing.PeerLeftWaiting/2");
  EXPECT_FALSE(output.passed);
  EXPECT_THAT(output.text,
              AllOf(HasSubstr("rank 0 of 2: "), HasSubstr("leaves its peer"),
                    HasSubstr("rank 1 of 2 was still in the case")));
}

TEST(ProcessWorld, TheNextCaseMeetsAFreshWorld) {
  auto output =
      run_case("Failing.Crash/3:Failing.TheNextCaseMeetsAFreshWorld/*");
  EXPECT_FALSE(output.passed);
  EXPECT_THAT(output.text,
              AllOf(HasSubstr("[       OK ] "
                              "Failing.TheNextCaseMeetsAFreshWorld/2"),
                    HasSubstr("[       OK ] "
                              "Failing.TheNextCaseMeetsAFreshWorld/3")));
}

}  // namespace
}  // namespace lockstep
