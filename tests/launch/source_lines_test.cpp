// Stacks name the functions of a program, and if it has debug information the
// lines of its sources.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/watch/source_finder.h"
#include "lockstep/worker/native_stack.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ContainsRegex;
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
  // Copies the program, runs `command` on the copy "program" in its folder, and
  // returns what the launcher says of its crash.
  std::string said_of_copy(const std::string& command) {
    fs::copy_file(kProgram, scratch() / "program");
    const auto changed = run_program(
        {"/bin/sh", "-c", "cd " + scratch().string() + " && " + command});
    EXPECT_EQ(changed.exit_code, 0) << changed.err;
    const auto result = run({"--log-dir=" + (scratch() / "logs").string(),
                             (scratch() / "program").string()});
    EXPECT_EQ(result.exit_code, 139);
    return result.err;
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
            ContainsRegex(place_of("the line of the crash") + " inlined at .*" +
                          place_of("the line of the inlined call") + "\n"),
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

// A bug: the number of the process that had sent a signal was called an
// address.
TEST_F(SourceLines, ASignalThatWasSentHasASenderAndNoAddress) {
  const auto keep = "--log-dir=" + (scratch() / "logs").string();
  EXPECT_THAT(run({keep, kProgram}).err,
              HasSubstr("  SIGSEGV at address 0x0\n"));
  EXPECT_THAT(run({keep, kProgram, "raise"}).err,
              HasSubstr("  SIGSEGV, which the process has sent to itself\n"));
  auto launcher = start({keep, kProgram, "wait"});
  launcher->await_output("ready");
  for (const pid_t pid : marked_processes({"RANK=0"})) kill(pid, SIGSEGV);
  EXPECT_THAT(launcher->finish().err,
              HasSubstr("  SIGSEGV, which process " + std::to_string(getpid()) +
                        " has sent\n"));
}

// The table of symbols, which every program has, was not read.
TEST_F(SourceLines, AProgramWithoutDebugInformationHasNamedFunctions) {
  const std::string said = said_of_copy("objcopy --strip-debug program");
  EXPECT_THAT(said,
              AllOf(HasSubstr("\n  in (anonymous namespace)::write_there(int "
                              "volatile*) in program\n  in main in program\n"),
                    Not(HasSubstr("crash_with_lines.cpp"))));
}

TEST_F(SourceLines, AStrippedProgramHasPlacesOnly) {
  EXPECT_THAT(said_of_copy("strip program"), HasSubstr("\n  in program +0x"));
}

// libdw opens a file of that name and waited for ever, and so did the launcher.
TEST_F(SourceLines, APipeInThePlaceOfDebugInformationIsNotAwaited) {
  EXPECT_THAT(said_of_copy("strip program && mkfifo program.debug"),
              HasSubstr("\n  in program +0x"));
}

TEST_F(SourceLines, DebugInformationMayLieInAFileOfItsOwn) {
  EXPECT_THAT(said_of_copy("objcopy --only-keep-debug program program.debug && "
                           "strip --strip-debug --strip-unneeded program && "
                           "objcopy --add-gnu-debuglink=program.debug program"),
              HasSubstr("write_there(int volatile*) in program at "));
}

// Clang writes no such table.
TEST_F(SourceLines, LinesAreFoundWithoutATableOfAddresses) {
  EXPECT_THAT(said_of_copy("objcopy --remove-section=.debug_aranges program"),
              HasSubstr(place_of("the line of the call") + "\n"));
}

TEST_F(SourceLines, WithoutTheModuleTheFramesStayAsTheyAre) {
  const auto result =
      run({"--log-dir=" + (scratch() / "logs").string(), kProgram},
          {.environment = {"LOCKSTEP_MODULE_PATH=/nowhere"}});
  EXPECT_EQ(result.exit_code, 139);
  EXPECT_THAT(result.err, AllOf(HasSubstr("\n  in crash_with_lines +0x"),
                                Not(HasSubstr("crash_with_lines.cpp"))));
}

TEST_F(SourceLines, WhatIsNoProgramIsNotRead) {
  const fs::path fifo = scratch() / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& file :
       {fifo.string(), std::string("/dev/zero"), std::string("/no/such/file"),
        scratch().string(), std::string(LOCKSTEP_CRASH_SOURCE)}) {
    EXPECT_THAT(SourceFinder().texts({file + "(+0x12) [0x11]"}),
                ElementsAre(file.substr(file.rfind('/') + 1) + " +0x12"));
  }
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

TEST(SourceFinder, AFunctionOfCIsNotATypeOfCpp) {
  EXPECT_THAT(SourceFinder().texts({"/usr/lib/liba.so(f+0x1c) [0x12]"}),
              ElementsAre("f +0x1c in liba.so"));
}

TEST(Frames, BeginWithTheProgramAndFoldLibraries) {
  const std::vector<std::string> all{
      "libc.so.6 +0x3",
      "at::_ops::mm::call(at::Tensor const&) +0x1 in libtorch_cpu.so",
      "void c10::check<int>() in train",
      "std::vector<int>::at(unsigned long) in train",
      "lockstep::all_reduce(at::Tensor const&) in train at a.cpp:1",
      "(anonymous namespace)::step() in train at train.cpp:57",
      "at::mm(at::Tensor const&) +0x1c in libtorch_cpu.so",
      "void loop<int>(int) in train at train.cpp:80",
      "main in train",
      "libc.so.6 +0x2724a",
      "_start +0x21 in train"};
  EXPECT_THAT(shown_frames(all, 3),
              ElementsAre(all[5], all[6], all[7],
                          "libc.so.6 +0x3, 5 frames further in"));
  EXPECT_THAT(folded_frames(all),
              ElementsAre(all[0], "... 3 frames of libraries", all[4], all[5],
                          all[6], all[7], all[8], all[9], all[10]));
  EXPECT_THAT(shown_frames({all[0], all[1]}, 6), ElementsAre(all[0], all[1]));
  EXPECT_THAT(shown_frames({all[8], all[9]}, 6), ElementsAre(all[8]));
  EXPECT_THAT(shown_frames({}, 6), ElementsAre());
}

}  // namespace
}  // namespace lockstep::internal::testing
