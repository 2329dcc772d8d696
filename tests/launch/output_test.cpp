// stdin, stdout, stderr and log files of the workers.
#include <gmock/gmock.h>

#include "tests/launch/launcher.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Output : public LauncherTest {
 protected:
  // The only attempt directory of the only run below `log_dir`.
  fs::path attempt(const fs::path& log_dir, int number) {
    for (const auto& run : fs::directory_iterator(log_dir)) {
      return run.path() / ("attempt_" + std::to_string(number));
    }
    return {};
  }
};

TEST_F(Output, PrefixedLinesAreNeverTorn) {
  const int lines_each = 2000;
  const std::string body(300, 'x');
  const auto result = run_script(
      {"--nproc-per-node=2", "--prefix-lines", "--role=net"},
      // Written in pieces on purpose.
      "i=0; while [ $i -lt " + std::to_string(lines_each) + " ]; do printf '" +
          body + " '; printf \"$i\\n\"; i=$((i+1)); done");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  int next[2] = {0, 0};
  for (const auto& line : lines(result.out)) {
    ASSERT_TRUE(line.starts_with("[net0]:") || line.starts_with("[net1]:"))
        << line;
    const int rank = line[4] - '0';
    ASSERT_EQ(line.substr(7), body + " " + std::to_string(next[rank]++));
  }
  EXPECT_EQ(next[0], lines_each);
  EXPECT_EQ(next[1], lines_each);
}

TEST_F(Output, LastLineWithoutNewlineAndBothStreamsArePrefixed) {
  const auto result = run_script({"--tee=3"}, "printf out; printf err >&2");
  EXPECT_EQ(result.out, "[default0]:out\n");
  EXPECT_EQ(result.err, "[default0]:err\n");
}

TEST_F(Output, PrefixTemplateOfTorchrunIsTaken) {
  const auto result =
      run_script({"--tee=1"}, "echo hello",
                 {.environment = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="
                                  "${role_name} rank ${rank}> "}});
  EXPECT_EQ(result.out, "default rank 0> hello\n");
}

TEST_F(Output, WithoutPrefixTheWorkerHasTheLaunchersOwnStream) {
  const auto result = run_script(
      {},
      "[ $(readlink /proc/$$/fd/1) = $(readlink /proc/$PPID/fd/1) ] && "
      "echo same");
  EXPECT_EQ(result.out, "same\n");
}

TEST_F(Output, LogDirectoryKeepsEveryAttemptAndRank) {
  const fs::path logs = scratch() / "logs";
  const auto result =
      run_script({"--nproc-per-node=2", "--max-restarts=1",
                  "--log-dir=" + logs.string(), "--redirects=2", "--tee=1:1"},
                 "echo out $RANK; echo err $RANK >&2; sleep 0.3; exit 5");
  EXPECT_EQ(result.exit_code, 5);
  for (const int number : {0, 1}) {
    const fs::path directory = attempt(logs, number);
    EXPECT_EQ(read_file(directory / "1" / "stdout.log"), "out 1\n");
    EXPECT_EQ(read_file(directory / "0" / "stderr.log"), "err 0\n");
    EXPECT_EQ(read_file(directory / "1" / "stderr.log"), "err 1\n");
    EXPECT_FALSE(fs::exists(directory / "0" / "stdout.log"));
  }
  EXPECT_EQ(count(result.out, "[default1]:out 1\n"), 2);
  EXPECT_EQ(count(result.out, "out 0\n"), 2);
  EXPECT_EQ(count(result.err, "err"), 0) << result.err;
}

TEST_F(Output, FilteredRanksAreSilentOnTheConsole) {
  const auto result = run_script(
      {"--nproc-per-node=3", "--local-ranks-filter=0,2"}, "echo rank $RANK");
  EXPECT_EQ(count(result.out, "rank 0\n") + count(result.out, "rank 2\n"), 2);
  EXPECT_EQ(count(result.out, "rank 1"), 0);
}

TEST_F(Output, StdinGoesToLocalRankZero) {
  const auto result =
      run_script({"--nproc-per-node=2"}, "read line; echo \"$RANK:$line\"",
                 {.input = "question\n"});
  EXPECT_EQ(count(result.out, "0:question\n"), 1) << result.out;
  EXPECT_EQ(count(result.out, "1:\n"), 1) << result.out;
}

TEST_F(Output, MessageOfTheErrorFileIsShown) {
  auto result = run_script(
      {},
      "printf %s '{\"message\": {\"message\": \"ValueError: bad\\nday\", "
      "\"extraInfo\": {}}}' > $TORCHELASTIC_ERROR_FILE; exit 1");
  EXPECT_THAT(result.err, HasSubstr("\n  ValueError: bad\n  day\n"));
  // Half a file, as from a worker that died while it wrote, is no matter.
  result = run_script(
      {}, "echo '{\"message\": {\"mess' > $TORCHELASTIC_ERROR_FILE; exit 4");
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_EQ(lines(result.err).size(), 2u) << result.err;
}

TEST_F(Output, ReaderThatGoesAwayEndsTheWorkers) {
  auto launcher = start({"--prefix-lines", "yes"});
  launcher->await_output("[default0]:y");
  launcher->close_output();
  const auto result = launcher->finish();
  EXPECT_EQ(result.exit_code, 128 + 13);
}

}  // namespace
}  // namespace lockstep::testing
