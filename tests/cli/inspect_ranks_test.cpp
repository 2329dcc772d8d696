// Records of real ranks that diverged (inspect_ranks.cpp): they are written
// after a failure and after SIGUSR1, and name the rank.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

class InspectRanks : public LauncherTest {
 protected:
  std::unique_ptr<RunningProgram> start_ranks(const std::string& mode) {
    return start(
        {"--nproc-per-node=3", LOCKSTEP_BIN_DIR "/tests/inspect_ranks", mode},
        {.environment = {"LOCKSTEP_FLIGHT_DIR=" + folder().string()}});
  }
  fs::path folder() const { return scratch() / "flight"; }

  // Returns the records by rank as soon as there are `number` of them.
  std::map<int, std::string> await_records(size_t number) {
    const auto deadline = Deadline::after(std::chrono::seconds(20));
    std::map<int, std::string> records;
    while (!deadline.expired() && records.size() < number) {
      std::this_thread::sleep_for(milliseconds(10));
      std::error_code none_yet;
      for (const auto& entry : fs::directory_iterator(folder(), none_yet)) {
        if (entry.path().extension() != ".json") continue;
        const json record = json::parse(read_file(entry.path()));
        records[record.at("rank")] = entry.path();
      }
    }
    EXPECT_EQ(records.size(), number);
    return records;
  }

  // Returns the process of each rank, from its line "ready <rank> <pid>".
  static std::map<int, pid_t> pids(const std::string& out) {
    std::map<int, pid_t> all;
    for (const auto& line : lines(out)) {
      std::istringstream words(line);
      std::string word;
      int rank = 0;
      pid_t pid = 0;
      if (words >> word >> rank >> pid && word == "ready") all[rank] = pid;
    }
    return all;
  }

  json inspect(const std::map<int, std::string>& records) {
    std::vector<std::string> arguments{"inspect", "flight", "--json"};
    for (const auto& [rank, path] : records) arguments.push_back(path);
    const auto result = run_command(arguments);
    const json document = json::parse(result.out);
    EXPECT_EQ(result.exit_code, document.at("diverged") ? 1 : 0);
    return document.at("groups").at(0);
  }

  static void end(RunningProgram& job) {
    job.signal(SIGTERM);
    job.finish();
  }
};

TEST_F(InspectRanks, FailureLeavesRecordsAndTheRankThatDidNotComeIsNamed) {
  auto job = start_ranks("absent");
  job->await_output("; flight record: ", 2);
  job->await_output("ready 2 ");
  const auto records = await_records(2);
  ASSERT_TRUE(records.contains(0) && records.contains(1));
  for (const auto& [rank, path] : records) {
    EXPECT_EQ(json::parse(read_file(path)).at("reason"), "failure");
    EXPECT_THAT(job->out(), HasSubstr("; flight record: " + path));
  }
  json group = inspect(records);
  EXPECT_EQ(group.at("verdict"), "no record");
  EXPECT_EQ(group.at("diverged_ranks"), json({2}));

  ::kill(pids(job->out()).at(2), SIGUSR1);
  group = inspect(await_records(3));
  EXPECT_EQ(group.at("verdict"), "absent");
  EXPECT_EQ(group.at("collective_seq_id"), 2);
  EXPECT_EQ(group.at("diverged_ranks"), json({2}));
  end(*job);
}

TEST_F(InspectRanks, SignalRecordsRanksThatAreStuckAndTheyGoOn) {
  auto job = start_ranks("stuck");
  job->await_output("ready ", 3);
  const auto ranks = pids(job->out());
  ASSERT_EQ(ranks.size(), 3u);
  // Repeats until both ranks are inside: a record may be written before that.
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  json group;
  do {
    for (const auto& [rank, pid] : ranks) ::kill(pid, SIGUSR1);
    group = inspect(await_records(3));
  } while (group.at("findings").dump().find("ranks 0, 2 are inside") ==
               std::string::npos &&
           !deadline.expired());
  EXPECT_EQ(group.at("verdict"), "absent");
  EXPECT_EQ(group.at("collective_seq_id"), 2);
  EXPECT_EQ(group.at("diverged_ranks"), json({1}));
  EXPECT_EQ(group.at("calls")[0].at("state"), "started");
  for (const auto& [rank, pid] : ranks) {
    EXPECT_EQ(::kill(pid, 0), 0) << "rank " << rank << " did not live on";
  }
  EXPECT_EQ(count(job->out(), "failed "), 0) << job->out();
  end(*job);
}

TEST_F(InspectRanks, RankThatCallsSomethingElseIsNamed) {
  auto job = start_ranks("different");
  job->await_output("; flight record: ", 3);
  const json group = inspect(await_records(3));
  EXPECT_EQ(group.at("verdict"), "mismatch");
  EXPECT_EQ(group.at("collective_seq_id"), 2);
  EXPECT_EQ(group.at("diverged_ranks"), json({1}));
  EXPECT_THAT(group.at("findings")[0].get<std::string>(),
              AllOf(HasSubstr("rank 1 called broadcast Float[1000] root 0"),
                    HasSubstr("all_reduce SUM Float[1000]")));
  end(*job);
}

}  // namespace
}  // namespace lockstep::internal::testing
