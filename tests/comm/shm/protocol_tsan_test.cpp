// Runs protocol_races.cpp under ThreadSanitizer, and proves that it would
// complain: the same ranks over a protocol that forgets its acquires.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/personality.h>

#include "tests/harness/running_program.h"

namespace lockstep::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kRaceFound = 66;  // ThreadSanitizer's exit code

class ShmProtocolUnderThreadSanitizer : public ProgramTest {
 protected:
  ShmProtocolUnderThreadSanitizer() {
    // Inherited by what is started: the sanitizer of some compilers does not
    // find room beside addresses that are chosen from too many.
    ::personality(ADDR_NO_RANDOMIZE);
  }
  ProgramResult run_ranks(const std::string& program,
                          const std::string& cases) {
    return run_program({std::string(LOCKSTEP_BIN_DIR) + "/tests/" + program,
                        "--gtest_filter=" + cases},
                       {}, std::chrono::seconds(100));
  }
};

TEST_F(ShmProtocolUnderThreadSanitizer, HasNoRace) {
  const auto result = run_ranks("shm_protocol_races", "*");
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("PASSED"));
}

TEST_F(ShmProtocolUnderThreadSanitizer, WouldSeeThatAnOrderIsMissing) {
  for (const char* cases : {"*OfOrdinaryMemory/0", "*OfRegisteredMemory/0",
                            "*OfMessagesBetweenCollectives/0"}) {
    const auto result = run_ranks("shm_protocol_broken_races", cases);
    EXPECT_EQ(result.exit_code, kRaceFound) << result.out << result.err;
    EXPECT_THAT(result.err, HasSubstr("ThreadSanitizer: data race"));
  }
}

}  // namespace
}  // namespace lockstep::testing
