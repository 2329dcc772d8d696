// Mistakes of the user of `lockstep bench`: each gives one clear line.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "tests/cli/bench_command.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class BenchOptions : public BenchTest {};

struct Mistake {
  std::vector<std::string> arguments;
  std::string line;
};

TEST_F(BenchOptions, AMistakeIsOneLineThatSaysWhatIsAllowed) {
  const std::vector<Mistake> mistakes{
      {{"all_redux"},
       "unknown operation \"all_redux\"; allowed are all_reduce, all_gather, "
       "reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, "
       "send_recv, barrier and all"},
      {{}, "no operation was given; say lockstep bench all_reduce, or all"},
      {{"all_reduce", "--dtype=float"},
       "unknown dtype \"float\"; allowed are float32, float64,"},
      {{"all_reduce", "--sizes=4,1X"},
       "\"1X\" is not a size; allowed are 1 to 1024G bytes, such as 4, 64K, "
       "1M"},
      {{"all_reduce", "--sizes=0"}, "\"0\" is not a size"},
      {{"all_reduce", "--sizes=1025G"}, "\"1025G\" is not a size"},
      {{"all_reduce", "--sizes=4", "--factor=2"}, "give a list or a range"},
      {{"all_reduce", "-b1M", "-e1K"}, "--max-bytes is 1K, less than"},
      {{"all_reduce", "--ranks=2,1"},
       "--ranks: Value 1 not in range 2 to 1024; see lockstep bench --help"},
      {{"all_reduce", "--competing=-1"},
       "--competing: Value -1 not in range 0 to 1024"},
      {{"all_reduce", "--iters=none"}, "--iters: Value none not in range"},
      {{"all_reduce", "--op=mean"},
       "unknown --op \"mean\"; allowed are sum, avg, product, min, max, band, "
       "bor, bxor"},
      {{"all_reduce", "--op=band"}, "--op band is for integers, not for float"},
      {{"reduce", "--op=avg", "--dtype=int8"},
       "--op avg is for floating point, not for int8"},
      {{"all_reduce", "--speed=9"},
       "The following argument was not expected: --speed=9; see lockstep bench "
       "--help"},
      {{"all_reduce", "--backend=carrier"}, "unknown backend \"carrier\""},
      {{"all_reduce", "--json=/nowhere/x.json"},
       "cannot write --json /nowhere/x.json: No such file"},
      {{"all_reduce", "--peers=gloo,mpich"},
       "unknown peer \"mpich\"; allowed are registered, gloo, python, "
       "python-lockstep, all, and NAME=PROGRAM"},
      {{"all_reduce", "--peers=mpich="}, "unknown peer \"mpich=\""},
      {{"all_reduce", "--peers=gloo,gloo=/bin/true"},
       "--peers names two sides \"gloo\"; give each program a name of its own"},
      {{"all_reduce", "--peers=mpich=/nowhere/mpich"},
       "program /nowhere/mpich: No such file or directory"},
      {{"all_reduce", "--peers", "--python=/nowhere/python"},
       "program /nowhere/python: No such file or directory; with --python or "
       "LOCKSTEP_PYTHON name a Python that has torch"},
  };
  for (const auto& mistake : mistakes) {
    const auto result = bench(mistake.arguments);
    EXPECT_EQ(result.exit_code, 2) << mistake.line;
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err,
                AllOf(StartsWith("lockstep bench: "), HasSubstr(mistake.line)));
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
  }
}

TEST_F(BenchOptions, APeerWithoutTorchIsOneLine) {
  // A program that starts like Python, but has no torch.
  const fs::path python = scratch() / "python";
  std::ofstream(python) << "#!/bin/sh\nexec python3 -S -I \"$@\"\n";
  fs::permissions(python, fs::perms::owner_all);
  const auto result =
      bench({"all_reduce", "--peers=python", "--sizes=4", "--iters=1"},
            {.environment = {"LOCKSTEP_PYTHON=" + python.string()}});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("lockstep bench: python: "),
                                HasSubstr("cannot import torch"),
                                HasSubstr("--python or LOCKSTEP_PYTHON")));
  EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
}

TEST_F(BenchOptions, HelpIsThatOfTheOtherProgram) {
  const auto help = bench({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("lockstep bench [OPTIONS]"),
                              HasSubstr("--peers"), HasSubstr("--sizes")));
  const auto all = run_program({LOCKSTEP_BIN_DIR "/lockstep", "--help"});
  EXPECT_THAT(all.out, AllOf(HasSubstr("bench  "), HasSubstr("run  ")));
}

TEST_F(BenchOptions, AMissingProgramIsOneLine) {
  fs::create_directory(scratch() / "bin");
  fs::copy(LOCKSTEP_BIN_DIR "/lockstep", scratch() / "bin/lockstep");
  const auto result = run_program(
      {(scratch() / "bin/lockstep").string(), "bench", "all_reduce"});
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.err, AllOf(StartsWith("lockstep bench: " +
                                           (scratch() / "libexec").string()),
                                HasSubstr("lockstep-bench is missing; ")));
  EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
}

}  // namespace
}  // namespace lockstep::internal::testing
