// Stacks of a program with debug information name the lines of its sources.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/native_stack.h"
#include "lockstep/launch/source_finder.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kProgram = LOCKSTEP_BIN_DIR "/tests/crash_with_lines";

// Returns "crash_with_lines.cpp:12" for the line that has this comment.
std::string place_of(const std::string& comment) {
  std::ifstream file(LOCKSTEP_CRASH_SOURCE);
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.find("// " + comment) != line.npos) {
      return "crash_with_lines.cpp:" + std::to_string(number);
    }
  }
  return "no such line";
}

class SourceLines : public LauncherTest {
 protected:
  void SetUp() override {
    if (run_program({"/bin/sh", "-c", "addr2line --version"}).exit_code != 0) {
      GTEST_SKIP() << "there is no addr2line (Debian: binutils)";
    }
  }
};

TEST_F(SourceLines, OfACrashAreInTheLaunchersLinesAndInTheReport) {
  const fs::path report = scratch() / "report.json";
  const auto result =
      run({"--report=" + report.string(),
           "--log-dir=" + (scratch() / "logs").string(), kProgram});
  EXPECT_EQ(result.exit_code, 139);
  EXPECT_THAT(
      result.err,
      AllOf(HasSubstr("write_there(int volatile*) in crash_with_lines at "),
            HasSubstr(place_of("the line of the crash") + "\n"),
            HasSubstr(place_of("the line of the call") + "\n")));
  const auto document = nlohmann::json::parse(read_file(report));
  EXPECT_THAT(document.dump(), HasSubstr(place_of("the line of the crash")));
}

TEST_F(SourceLines, OfAThreadAreInWhatLockstepStacksPrints) {
  auto job = start({"--rdzv-id=lines", kProgram, "wait"});
  job->await_output("ready");
  // The rank may reach its agent a moment after it is ready.
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  ProgramResult stacks;
  do {
    stacks = run_command({"stacks", "lines"});
  } while (stacks.exit_code != 0 && !deadline.expired());
  EXPECT_EQ(stacks.exit_code, 0) << stacks.err;
  EXPECT_THAT(stacks.out,
              AllOf(HasSubstr("wait_there() in crash_with_lines at "),
                    HasSubstr(place_of("the line of the wait") + "\n")));
  job->signal(SIGTERM);
  job->finish();
}

// As for a program without debug information.
TEST_F(SourceLines, WithoutAddr2lineTheFramesStayAsTheyAre) {
  const auto result =
      run({"--log-dir=" + (scratch() / "logs").string(), kProgram},
          {.environment = {"PATH=/nowhere"}});
  EXPECT_EQ(result.exit_code, 139);
  EXPECT_THAT(result.err, AllOf(HasSubstr("\n  in crash_with_lines +0x"),
                                Not(HasSubstr("crash_with_lines.cpp"))));
}

// An addr2line that never ends, in whose place others may be.
TEST_F(SourceLines, AProgramThatHangsIsNotWaitedForLong) {
  fs::create_directories(scratch() / "bin");
  const fs::path hanging = scratch() / "bin/addr2line";
  std::ofstream(hanging) << "#!/bin/sh\nexec sleep 300\n";
  fs::permissions(hanging, fs::perms::owner_all);
  const auto result =
      run({"--log-dir=" + (scratch() / "logs").string(), kProgram},
          {.environment = {"PATH=" + (scratch() / "bin").string() +
                           ":/usr/bin:/bin"}});
  EXPECT_EQ(result.exit_code, 139);
  EXPECT_THAT(result.err, HasSubstr("\n  in crash_with_lines +0x"));
  EXPECT_TRUE(await_no_process(std::chrono::seconds(5)));
}

TEST(SourceFinder, OnlyModulesWithATableOfLinesAreRead) {
  EXPECT_TRUE(has_source_lines(kProgram));
  EXPECT_FALSE(has_source_lines("/bin/sh"));
  EXPECT_FALSE(has_source_lines("/no/such/file"));
  EXPECT_FALSE(has_source_lines("/dev/null"));
  EXPECT_FALSE(has_source_lines(LOCKSTEP_CRASH_SOURCE));
}

TEST(SourceFinder, WhatIsNoFrameStaysAsItIs) {
  const std::vector<std::string> lines{"",
                                       "[0x7f12]",
                                       "at::mm(int) +0x1 in a",
                                       "(+0x1) [0x1]",
                                       "a(b+0x1) [0x]",
                                       "a(b+0x1) [0x1] at c"};
  EXPECT_EQ(SourceFinder().texts(lines), lines);
}

TEST(SourceFinder, FramesOfModulesWithoutLinesAreForPeople) {
  EXPECT_THAT(SourceFinder().texts({"/usr/lib/liba.so(_ZN1a1bEi+0x1c) [0x12]",
                                    "/no/such (x)/libb.so(+0x1234) [0x1233]"}),
              ElementsAre("a::b(int) +0x1c in liba.so", "libb.so +0x1234"));
}

}  // namespace
}  // namespace lockstep::internal::testing
