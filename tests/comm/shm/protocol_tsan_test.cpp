// Runs protocol_races.cpp under ThreadSanitizer, and proves that it would
// complain: runs the same ranks over a protocol that lacks its acquires.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/personality.h>

#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kRaceFound = 66;  // ThreadSanitizer's exit code
const char* const kNoRoom =
    "ThreadSanitizer finds no room beside random addresses, and "
    "personality(ADDR_NO_RANDOMIZE) is forbidden here";

class ShmProtocolUnderThreadSanitizer : public ProgramTest {
 protected:
  ShmProtocolUnderThreadSanitizer() {
    // The started programs inherit this setting. The sanitizer of some
    // compilers finds no room if addresses are chosen from too wide a range.
    const int before = ::personality(0xffffffff);
    fixed_addresses_ =
        before >= 0 &&
        ::personality(static_cast<unsigned>(before) | ADDR_NO_RANDOMIZE) >= 0;
  }
  ProgramResult run_ranks(const std::string& program,
                          const std::string& cases) {
    return run_program(
        {LOCKSTEP_BIN_DIR "/tests/" + program, "--gtest_filter=" + cases}, {},
        std::chrono::seconds(100));
  }
  // Returns whether the sanitizer failed because the container forbids fixed
  // addresses.
  bool finds_no_room(const ProgramResult& result) const {
    return !fixed_addresses_ &&
           result.err.find("unexpected memory mapping") != std::string::npos;
  }

  bool fixed_addresses_ = false;
};

TEST_F(ShmProtocolUnderThreadSanitizer, HasNoRace) {
  const auto result = run_ranks("shm_protocol_races", "*");
  if (finds_no_room(result)) GTEST_SKIP() << kNoRoom;
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("PASSED"));
}

TEST_F(ShmProtocolUnderThreadSanitizer, WouldSeeThatAnOrderIsMissing) {
  for (const char* cases :
       {"*OfOrdinaryMemory/0", "*OfRegisteredMemory/0",
        "*OfMessagesBetweenCollectives/0", "*OfRoundsBesideCollectives/0",
        "*OfASplitBarrier/0"}) {
    const auto result = run_ranks("shm_protocol_broken_races", cases);
    if (finds_no_room(result)) GTEST_SKIP() << kNoRoom;
    EXPECT_EQ(result.exit_code, kRaceFound) << result.out << result.err;
    EXPECT_THAT(result.err, HasSubstr("ThreadSanitizer: data race"));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
