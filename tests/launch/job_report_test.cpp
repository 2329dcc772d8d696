// Tests what `lockstep run --report` writes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class JobReports : public LauncherTest {
 protected:
  std::vector<std::string> options(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), "--report=" + file().string());
    return more;
  }
  fs::path file() const { return scratch() / "report.json"; }
  // Returns what the launcher has written. Nothing else may be left beside it.
  json report() const {
    for (const auto& entry : fs::directory_iterator(scratch())) {
      EXPECT_THAT(entry.path().filename().string(),
                  ::testing::Not(::testing::StartsWith("report.json.")));
    }
    return json::parse(read_file(file()), nullptr, false);
  }
};

TEST_F(JobReports, ASuccessSaysWhatRan) {
  std::ofstream(file()) << "of an earlier job";
  const auto result = run_script(
      options({"--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=night"}),
      "[ ! -e " + file().string() + " ]");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const json all = report();
  EXPECT_EQ(all["result"], "succeeded");
  EXPECT_EQ(all["exit_code"], 0);
  EXPECT_EQ(all["cause"], "");
  EXPECT_TRUE(all["signal"].is_null());
  EXPECT_EQ(all["run_id"], "night");
  EXPECT_EQ(all["program"][0], "sh");
  EXPECT_EQ(all["world_size"], 2);
  EXPECT_EQ(all["nnodes"], 1);
  EXPECT_EQ(all["restarts_used"], 0);
  EXPECT_EQ(all["max_restarts"], 3);
  EXPECT_EQ(all["failed_attempts"], json::array());
  constexpr const char* kTime =
      "20[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\\.[0-9]+Z";
  EXPECT_THAT(std::string(all["started"]), MatchesRegex(kTime));
  EXPECT_LE(std::string(all["started"]), std::string(all["ended"]));
  EXPECT_GT(all["seconds"], 0);
}

// Regression: a launch that could not begin left the report of yesterday's
// success.
TEST_F(JobReports, ALaunchThatCannotBeginLeavesNoReport) {
  std::ofstream(file()) << "of an earlier job";
  EXPECT_EQ(run_script(options({"--nproc-per-node=0"}), "true").exit_code, 2);
  EXPECT_FALSE(fs::exists(file()));
  // The value was forgotten, so it is the program.
  std::ofstream(file()) << "#!/bin/sh";
  EXPECT_EQ(run({"--report", file().string()}).exit_code, 2);
  EXPECT_TRUE(fs::exists(file()));
}

// --report=/dev/full removed the device, and made a file in its place.
TEST_F(JobReports, APipeOrADeviceIsWrittenThrough) {
  ASSERT_EQ(::mkfifo(file().c_str(), 0600), 0);
  const FileDescriptor reader(::open(file().c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_EQ(run_script(options(), "exit 0").exit_code, 0);
  ASSERT_TRUE(fs::is_fifo(file()));
  std::string text(1 << 16, ' ');
  const ssize_t count = ::read(reader.get(), text.data(), text.size());
  ASSERT_GT(count, 0);
  text.resize(static_cast<size_t>(count));
  EXPECT_EQ(json::parse(text)["result"], "succeeded");
}

TEST_F(JobReports, EveryFailureHasItsRankAndWhatIsKnown) {
  const auto result = run_script(
      options({"--nproc-per-node=2", "--max-restarts=1", "--redirects=3",
               "--log-dir=" + (scratch() / "logs").string()}),
      "[ $RANK = 0 ] && exec sleep 60; echo '{\"message\": \"no file\"}' > "
      "$TORCHELASTIC_ERROR_FILE; echo one; echo last words >&2; "
      "echo > $LOCKSTEP_FLIGHT_DIR/lockstep-flight-1-rank1.json; "
      "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 7; kill -9 $$",
      {.environment = {"LOCKSTEP_FLIGHT_DIR="}});
  EXPECT_EQ(result.exit_code, 137);
  const json all = report();
  EXPECT_EQ(all["result"], "failed");
  EXPECT_EQ(all["exit_code"], 137);
  EXPECT_THAT(std::string(all["cause"]),
              HasSubstr("rank 1 failed: killed by SIGKILL (exit code 137): no "
                        "file"));
  EXPECT_EQ(all["restarts_used"], 1);
  ASSERT_EQ(all["failed_attempts"].size(), 2u);
  for (int restart = 0; restart < 2; ++restart) {
    const json& attempt = all["failed_attempts"][restart];
    EXPECT_EQ(attempt["restart"], restart);
    const fs::path folder = std::string(attempt["directory"]);
    EXPECT_EQ(folder.filename(), "attempt_" + std::to_string(restart));
    EXPECT_THAT(read_file(std::string(attempt["crash_report"])),
                HasSubstr("last words"));
    EXPECT_EQ(attempt["flight_records"],
              json{(folder / "lockstep-flight-1-rank1.json").string()});
    EXPECT_TRUE(attempt["stacks"].is_null());
    ASSERT_EQ(attempt["failures"].size(), 1u);
    const json& failure = attempt["failures"][0];
    EXPECT_EQ(failure["rank"], 1);
    EXPECT_EQ(failure["local_rank"], 1);
    EXPECT_EQ(failure["host"], all["host"]);
    EXPECT_GT(failure["pid"], 1);
    EXPECT_EQ(failure["exit_code"], restart == 0 ? 7 : 137);
    EXPECT_EQ(failure["signal"], restart == 0 ? json() : json("SIGKILL"));
    EXPECT_EQ(failure["hung"], false);
    EXPECT_EQ(failure["kind"], "unknown");
    EXPECT_EQ(failure["message"], "no file");
    EXPECT_LE(std::string(all["started"]), std::string(failure["time"]));
    ASSERT_EQ(failure["logs"].size(), 2u);
    EXPECT_EQ(failure["logs"][0]["last_lines"], json{"last words"});
    EXPECT_EQ(failure["logs"][1]["last_lines"], json{"one"});
    EXPECT_EQ(read_file(std::string(failure["logs"][1]["file"])), "one\n");
  }
}

TEST_F(JobReports, AttemptsBeforeASuccessAreToldWithoutFilesThatAreGone) {
  const auto result =
      run_script(options({"--max-restarts=1"}),
                 "echo > $LOCKSTEP_FLIGHT_DIR/lockstep-flight-1-rank0.json; "
                 "exit $((1 - TORCHELASTIC_RESTART_COUNT))",
                 {.environment = {"LOCKSTEP_FLIGHT_DIR="}});
  EXPECT_EQ(result.exit_code, 0);
  const json all = report();
  EXPECT_EQ(all["result"], "succeeded");
  EXPECT_EQ(all["restarts_used"], 1);
  ASSERT_EQ(all["failed_attempts"].size(), 1u);
  const json& attempt = all["failed_attempts"][0];
  EXPECT_EQ(attempt["cause"], "rank 0 failed: exit code 1");
  EXPECT_TRUE(attempt["directory"].is_null());
  EXPECT_TRUE(attempt["crash_report"].is_null());
  EXPECT_EQ(attempt["flight_records"], json::array());
}

TEST_F(JobReports, ASignalThatEndsTheJobIsNamed) {
  auto job = start_script(options(), "echo ready; exec sleep 60");
  job->await_output("ready");
  job->signal(SIGTERM);
  EXPECT_EQ(job->finish().exit_code, 143);
  const json all = report();
  EXPECT_EQ(all["result"], "signalled");
  EXPECT_EQ(all["exit_code"], 143);
  EXPECT_EQ(all["signal"], "SIGTERM");
  EXPECT_EQ(all["cause"], "SIGTERM ended the job");
}

TEST_F(JobReports, OneOfTheLaunchersProcessesWritesItIfTheOtherIsKilled) {
  auto job = start_script(options(), "echo agent $PPID; exec sleep 60");
  job->await_output("agent ");
  kill(std::stoi(job->out().substr(6)), SIGKILL);
  EXPECT_EQ(job->finish().exit_code, 137);
  EXPECT_EQ(report()["exit_code"], 137);
  EXPECT_THAT(std::string(report()["cause"]),
              HasSubstr("agent was killed by SIGKILL"));

  fs::remove(file());
  job = start_script(options(), "echo agent $PPID; exec sleep 60");
  job->await_output("agent ");
  job->signal(SIGKILL);
  job->finish();
  const Deadline deadline = Deadline::after(seconds(20));
  while (!fs::exists(file()) && !deadline.expired()) {
  }
  EXPECT_EQ(report()["exit_code"], 137);
  EXPECT_EQ(report()["cause"], "the launcher was killed");
}

TEST_F(JobReports, AFileThatCannotBeWrittenInTheEndIsOneLine) {
  const fs::path folder = scratch() / "folder";
  fs::create_directory(folder);
  const auto result =
      run_script({"--report=" + (folder / "report.json").string()},
                 "rmdir " + folder.string() + "; exit 3");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr("lockstep run: writing the report " +
                                    (folder / "report.json").string() +
                                    ": No such file or directory\n"));
}

}  // namespace
}  // namespace lockstep::internal::testing
