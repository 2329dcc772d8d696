// Real ranks: the table and the JSON of small runs.
#include <gmock/gmock.h>
#include <signal.h>

#include <sstream>

#include "tests/cli/bench_command.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Bench : public BenchTest {};

std::vector<std::string> words(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> all;
  for (std::string word; stream >> word;) all.push_back(word);
  return all;
}

// Rows of figures: lines that begin with a number.
std::vector<std::vector<std::string>> rows(const std::string& table) {
  std::vector<std::vector<std::string>> all;
  for (const auto& line : lines(table)) {
    auto row = words(line);
    if (!row.empty() && isdigit(row[0][0])) all.push_back(std::move(row));
  }
  return all;
}

// The completion asks the program that `lockstep bench` starts for its options.
TEST_F(Bench, OptionsAreCompleted) {
  const std::string command = LOCKSTEP_BIN_DIR "/lockstep";
  const auto offered = run_program(
      {"/bin/bash", "-c",
       ". <(" + command + " completion bash); COMP_WORDS=(" + command +
           " bench --ra); COMP_CWORD=2; _lockstep; "
           "printf '%s\\n' \"${COMPREPLY[@]}\""});
  EXPECT_EQ(offered.err, "");
  EXPECT_THAT(lines(offered.out), Contains("--ranks"));
}

TEST_F(Bench, EveryOperationInWorldsWithinAndBeyondTheCores) {
  const auto document = bench_json(
      {"all", "--ranks=2,5", "--sizes=1000,40K", "--iters=3", "--warmup=1"});
  expect_plausible(document);
  std::map<std::string, int> seen;
  for (const json& entry : document.at("results")) {
    EXPECT_EQ(entry.at("side"), "lockstep");
    EXPECT_EQ(entry.at("iterations"), 3);
    ++seen[entry.at("operation")];
  }
  EXPECT_EQ(seen.size(), 10u);
  for (const auto& [operation, times] : seen) {
    // There is a result for each world, and for each size unless it is a
    // barrier.
    EXPECT_EQ(times, operation == "barrier" ? 2 : 4) << operation;
  }
}

TEST_F(Bench, BytesAreThoseOfAllRanksPartsTogether) {
  const auto document =
      bench_json({"all_gather,all_reduce", "--ranks=3", "--sizes=4,8,1000",
                  "--iters=1", "--dtype=float64"});
  std::vector<int64_t> gathered;
  std::vector<int64_t> reduced;
  for (const json& entry : document.at("results")) {
    auto& bytes = entry.at("operation") == "all_gather" ? gathered : reduced;
    bytes.push_back(entry.at("bytes"));
    EXPECT_EQ(entry.at("elements").get<int64_t>() * 8, bytes.back());
  }
  // Each rank has at least one element; sizes that round to the same run once.
  EXPECT_THAT(gathered, ElementsAre(24, 984));
  EXPECT_THAT(reduced, ElementsAre(8, 1000));
}

TEST_F(Bench, TableHasOneAlignedRowASize) {
  const auto result = bench({"all_reduce", "-b4", "-e64", "-f4", "-n2",
                             "-dbfloat16", "-omax", "--async"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr(" cores, "), HasSubstr("; backend lockstep;"),
                    HasSubstr("# all_reduce max bfloat16 async, 2 ranks")));
  const auto table = rows(result.out);
  ASSERT_EQ(table.size(), 3u) << result.out;
  for (size_t i = 0; i < table.size(); ++i) {
    ASSERT_EQ(table[i].size(), 11u);
    EXPECT_EQ(table[i][0], std::to_string(4 << 2 * i));  // bytes
    EXPECT_EQ(table[i][1], std::to_string(2 << 2 * i));  // elements
    EXPECT_EQ(table[i][2], "2");                         // iterations
    EXPECT_EQ(table[i][10], "0");                        // wrong
  }
  size_t width = 0;
  for (const auto& line : lines(result.out)) {
    if (line.empty() || line[0] == '#') continue;
    if (width == 0) width = line.size();
    EXPECT_EQ(line.size(), width) << result.out;
  }
}

TEST_F(Bench, JsonOnStdoutLeavesTheTableToStderr) {
  const auto result = bench({"broadcast", "--sizes=16", "--iters=2",
                             "--dtype=int8,float16", "--json=-"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto document = json::parse(result.out);
  expect_plausible(document);
  EXPECT_EQ(document.at("results").size(), 2u);
  EXPECT_EQ(document.at("results")[1].at("dtype"), "float16");
  EXPECT_TRUE(document.at("results")[1].at("reduce_op").is_null());
  EXPECT_EQ(rows(result.err).size(), 2u) << result.err;
}

// A bug: figures that were lost were a success.
TEST_F(Bench, OutputThatAFullDiskLosesIsAFailure) {
  for (const char* option : {"", " --json=-"}) {
    const auto result = run_program({"/bin/sh", "-c",
                                     "exec " LOCKSTEP_BIN_DIR
                                     "/lockstep bench broadcast --sizes=16 "
                                     "--iters=2" +
                                         std::string(option) + " > /dev/full"});
    EXPECT_EQ(result.exit_code, 1) << option;
    EXPECT_THAT(result.err, HasSubstr("its output could not be written"));
  }
}

TEST_F(Bench, ReductionsOtherThanSumsAreFoundRight) {
  for (const std::string op : {"avg", "product", "max"}) {
    expect_plausible(bench_json({"all_reduce,reduce,reduce_scatter",
                                 "--op=" + op, "--ranks=3", "--sizes=4K",
                                 "--dtype=float32,float16", "--iters=1"}));
  }
  expect_plausible(
      bench_json({"all_reduce,reduce,reduce_scatter", "--op=bxor", "--sizes=4K",
                  "--dtype=uint8,int64", "--iters=1"}));
}

TEST_F(Bench, InterruptLeavesNoProcess) {
  for (const int signal : {SIGINT, SIGTERM}) {
    auto program = start_bench({"all_reduce", "--ranks=3", "--sizes=1K",
                                "--iters=1000000", "--timeout=300"});
    program->await_output("bytes");  // ranks are connected and at work
    program->signal(signal);
    EXPECT_EQ(program->finish().exit_code, 128 + signal);
    EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
  }
}

TEST_F(Bench, CompetingProcessesComputeAndEndWithTheBench) {
  const auto document =
      bench_json({"all_reduce", "--competing=1", "--sizes=4", "--iters=2"});
  EXPECT_EQ(document.at("competing"), 1);
  for (const int signal : {SIGINT, SIGKILL}) {
    auto program =
        start_bench({"all_reduce", "--competing=3", "--sizes=4",
                     "--iters=1000000", "--warmup=1000000", "--timeout=300"});
    program->await_output("# 3 competing processes");
    program->await_output("bytes");
    // The bench itself, two ranks, and these.
    EXPECT_EQ(marked_processes().size(), 6u);
    program->signal(signal);
    EXPECT_EQ(program->finish().exit_code, 128 + signal);
    EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
