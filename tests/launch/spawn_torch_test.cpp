// spawn() with LibTorch and a process group (spawn_all_reduce.cpp).
#include <gmock/gmock.h>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

class SpawnTorch : public LauncherTest {
 protected:
  const std::string program_ = LOCKSTEP_BIN_DIR "/tests/spawn_all_reduce";
};

TEST_F(SpawnTorch, RanksMeetInAGroup) {
  for (const int size : {1, 2, 4}) {
    const auto result = run_program({program_, std::to_string(size)});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    const std::string sum = std::to_string(size * (size + 1) / 2);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_THAT(result.out,
                  HasSubstr("rank " + std::to_string(rank) + " of " +
                            std::to_string(size) + " has " + sum + "\n"));
    }
    EXPECT_EQ(count(result.out, "joined, 256\n"), 1) << result.out;
  }
}

TEST_F(SpawnTorch, WorldsUnderALauncherMeetEachInItsOwnGroup) {
  const auto result = run({"--nproc-per-node=2", program_, "2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "rank 0 of 2 has 3\n"), 2) << result.out;
  EXPECT_EQ(count(result.out, "rank 1 of 2 has 3\n"), 2) << result.out;
}

TEST_F(SpawnTorch, RankThatThrowsIsNamedNotThePeersThatWaitForIt) {
  const auto result = run_program({program_, "3", "fail"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("rank 1 of 3 (pid "));
  EXPECT_THAT(result.out,
              HasSubstr("threw std::runtime_error: rank 1 had enough\n"));
}

TEST_F(SpawnTorch, RankThatCatchesWhatItThrewIsNamed) {
  const auto result = run_program({program_, "8", "catch"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("rank 1: no such file: x.csv\n"));
  EXPECT_THAT(result.out, HasSubstr(": rank 1 of 8 (pid "));
}

// what() of LibTorch's exceptions ends with a C++ backtrace.
TEST_F(SpawnTorch, ErrorOfLibTorchIsShownWithoutItsBacktrace) {
  const auto result = run_program({program_, "2", "fail-in-torch"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out,
              HasSubstr("threw c10::Error: The size of tensor a (2) must match "
                        "the size of tensor b (3)"));
  EXPECT_THAT(result.out, Not(HasSubstr("Exception raised from")));
  EXPECT_THAT(result.out, Not(HasSubstr("frame #")));
  EXPECT_EQ(count(result.out, "failed: "), 1) << result.out;
  EXPECT_THAT(result.out.substr(result.out.find("failed: ")),
              MatchesRegex("[^\n]*\n"));
}

}  // namespace
}  // namespace lockstep::internal::testing
