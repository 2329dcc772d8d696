// Tests what `lockstep bench` does with its ranks' answers. The ranks answer
// what the test wants: the test copies the program and puts a script in place
// of the rank's program.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "tests/cli/bench_command.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class BenchRanks : public BenchTest {
 protected:
  // Runs the bench with `rank`, shell code, in place of the rank's program.
  ProgramResult bench_with(const std::string& rank,
                           const std::vector<std::string>& options) {
    fs::copy_file(LOCKSTEP_LIBEXEC_DIR "/lockstep-bench",
                  scratch() / "lockstep-bench",
                  fs::copy_options::overwrite_existing);
    const fs::path program = scratch() / "lockstep-bench-rank";
    std::ofstream(program) << "#!/bin/sh\n" << rank << "\n";
    fs::permissions(program, fs::perms::owner_all);
    std::vector<std::string> command{(scratch() / "lockstep-bench").string(),
                                     "all_reduce", "--iters=4"};
    command.insert(command.end(), options.begin(), options.end());
    return run_program(command);
  }
  // Runs the bench with ranks that run `answer`, shell code, for each request;
  // $RANK and $id are set.
  ProgramResult bench_of(const std::string& answer,
                         std::vector<std::string> options = {},
                         const std::vector<std::string>& sizes = {
                             "--sizes=4000"}) {
    options.insert(options.end(), sizes.begin(), sizes.end());
    return bench_with(
        "echo 'a library greets'\n"
        "echo '{\"id\":0,\"rank\":'$RANK',\"torch\":\"none\"}'\n"
        "while read -r line; do\n"
        "  id=${line#*'\"id\":'}; id=${id%%,*}\n" +
            answer + "\ndone",
        options);
  }
  static std::string say(const std::string& fields) {
    return "echo '{\"id\":'$id',\"rank\":'$RANK'," + fields + "}'";
  }
};

TEST_F(BenchRanks, AnIterationTakesAsLongAsItsSlowestRank) {
  const auto result = bench_of(
      "if [ $RANK = 0 ]; then\n" +
          say("\"wrong\":0,\"ns\":[1000,9000,3000,4000]") + "\nelse\n" +
          say("\"wrong\":0,\"ns\":[2000,1000,3500,1000]") + "\nfi",
      {"--json=-"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto document = json::parse(result.out);
  expect_plausible(document);
  const json& entry = document.at("results").at(0);
  EXPECT_EQ(entry.at("latency_us"), json({{"min", 2.0},
                                          {"p50", 3.5},
                                          {"p90", 9.0},
                                          {"p99", 9.0},
                                          {"max", 9.0}}));
  EXPECT_NEAR(entry.at("algbw_gbps"), 4000 / 3.5e3, 1e-5);
}

TEST_F(BenchRanks, WrongElementsAreCountedAndFailTheRun) {
  const auto result =
      bench_of(say("\"wrong\":'$RANK',\"ns\":[1,1,1,1],"
                   "\"first_wrong\":\"element 7 is 5, not 6\""));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("all_reduce of 1000 float32 over 2 ranks: "
                                    "rank 1 has 1 wrong elements; element 7 is "
                                    "5, not 6"));
  EXPECT_THAT(result.err, HasSubstr("results were wrong"));
  EXPECT_EQ(count(result.err, "\n"), 2) << result.err;
  EXPECT_THAT(result.out, HasSubstr("  1\n"));
}

TEST_F(BenchRanks, ADeadRankIsNamed) {
  const auto result = bench_of("if [ $RANK = 1 ]; then kill -SEGV $$; fi");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err,
            "lockstep bench: lockstep: rank 1 of 2 was killed by SIGSEGV\n");
}

TEST_F(BenchRanks, ARankThatFailsAloneIsNamedWithItsWords) {
  const auto result = bench_of("if [ $RANK = 1 ]; then " +
                               say("\"error\":\"no cable\"") + "; fi");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err,
            "lockstep bench: lockstep: rank 1 of 2 failed: no cable\n");
}

TEST_F(BenchRanks, ARankThatCannotStartIsNamedWithItsWords) {
  // Runs the rank's own program: rank 0 waits for rank 1.
  const auto result = bench_with(
      "if [ $RANK = 1 ]; then export WORLD_SIZE=none; fi\n"
      "exec " LOCKSTEP_LIBEXEC_DIR "/lockstep-bench-rank \"$@\"",
      {"--sizes=4"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("lockstep bench: lockstep: rank 1 of 2 failed: "),
                    HasSubstr("WORLD_SIZE")));
}

TEST_F(BenchRanks, AMistakeOfTheUserIsOneThoughARankIsSlowToFindIt) {
  const auto result = bench_with(
      "if [ $RANK = 1 ]; then read -r never; fi\n"
      "exec " LOCKSTEP_LIBEXEC_DIR "/lockstep-bench-rank \"$@\"",
      {"--sizes=4", "--backend=carrier"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("unknown backend \"carrier\""));
}

TEST_F(BenchRanks, ARankThatEndsIsNamedWithWhatAnotherSaysOfIt) {
  const auto result = bench_of("if [ $RANK = 1 ]; then exit 3; fi\n" +
                               say("\"error\":\"a peer has gone\""));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err,
            "lockstep bench: lockstep: rank 1 of 2 ended with exit code 3; "
            "rank 0 failed: a peer has gone\n");
}

TEST_F(BenchRanks, ARankThatClosesItsOutputIsNotSaidToBeLate) {
  const auto result =
      bench_of("if [ $RANK = 1 ]; then exec >&-; read -r never; fi");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err,
            "lockstep bench: lockstep: rank 1 of 2 closed its stdout without "
            "an answer\n");
}

TEST_F(BenchRanks, ASilentRankIsNamedWhenTheTimeIsOver) {
  const auto result = bench_of(
      "if [ $RANK = 0 ]; then " + say("\"wrong\":0,\"ns\":[1,1,1,1]") + "; fi",
      {"--timeout=1"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err,
            "lockstep bench: lockstep: rank 1 of 2 did not answer within 3000 "
            "ms; see --timeout\n");
}

TEST_F(BenchRanks, ARangeEndsBeforeASizeThatOverflows) {
  const auto result =
      bench_of(say("\"wrong\":0,\"ns\":[1,1,1,1]"), {"--json=-"},
               {"-b11G", "-e11G", "-f1073741823"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto results = json::parse(result.out).at("results");
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].at("bytes"), int64_t{11} << 30);
}

TEST_F(BenchRanks, WhatAllRanksRefuseIsSaidOnce) {
  const auto result =
      bench_of(say("\"error\":\"float32 is not for me\",\"usage\":true"));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err,
            "lockstep bench: lockstep: all_reduce of 1000 float32 over 2 "
            "ranks: float32 is not for me\n");
}

}  // namespace
}  // namespace lockstep::internal::testing
