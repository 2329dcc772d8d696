// Standby processes: when they become workers and what they get then, and which
// programs cannot stand by.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "tests/harness/asleep.h"
#include "tests/launch/nodes.h"
#include "tests/launch/standby_job.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kRank = LOCKSTEP_BIN_DIR "/tests/standby_rank";

// Returns how many sockets the workers' store of this worker's agent has: one
// that listens, and one for each connection.
int store_sockets(pid_t worker) {
  const std::string agent = stat_fields(worker).at(3);
  std::istringstream all(read_file("/proc/net/unix"));
  int sockets = 0;
  for (std::string line; std::getline(all, line);) {
    sockets += line.find("@lockstep-store/" + std::to_string(getuid()) + "/" +
                         agent + "/") != line.npos
                   ? 1
                   : 0;
  }
  return sockets;
}

// Waits until the first worker of its agent is in init_process_group().
void await_in_init(pid_t worker) {
  const Deadline deadline = Deadline::after(seconds(60));
  while (!deadline.expired() && store_sockets(worker) < 2) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_TRUE(await_asleep(worker));
}

class Standby : public StandbyJob {
 protected:
  std::unique_ptr<RunningProgram> start_job(const std::string& scenario,
                                            std::vector<std::string> options,
                                            const std::string& input = "") {
    return StandbyJob::start_job(kRank, scenario, std::move(options), input);
  }
};

TEST_F(Standby, TakesThePlacesOfAllWorkersAtARestart) {
  auto job = start_job("train",
                       {"--max-restarts=2", "--standby=2", "--prefix-lines",
                        "--log-dir", (scratch() / "logs").string(), "--tee=3"});
  job->await_output(" stood by 0 ", 2);
  ASSERT_NO_FATAL_FAILURE(await_standby(2));
  EXPECT_THAT(run_command({"status", name()}).out,
              HasSubstr("2 of 2 workers run, 2 stand by"));
  kill_worker(1);
  job->await_output(" stood by 1 ", 2);
  for (const std::string rank : {"0", "1"}) {
    EXPECT_THAT(job->out(), HasSubstr("[default" + rank + "]:rank " + rank +
                                      " of 2 local " + rank +
                                      " restart 1 stood by 1 sum 3 "));
  }
  EXPECT_EQ(count(job->out(), " mark none "), 4);
  // The output that they wrote before is the rank's.
  EXPECT_EQ(count(job->out(), "]:early "), 4);
  EXPECT_EQ(count(job->out(), "/attempt_1/0/error.json"), 1);

  // Others take their places, for the next restart.
  ASSERT_NO_FATAL_FAILURE(await_standby(2, 1));
  kill_worker(0);
  job->await_output(" restart 2 stood by 1 ", 2);
  stop();
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "with 2 from standby on this node"), 2)
      << result.err;
  int logs = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(scratch() / "logs")) {
    if (entry.path().filename() != "stdout.log") continue;
    ++logs;
    const std::string text = read_file(entry.path());
    EXPECT_EQ(count(text, "early "), 1) << entry.path() << ": " << text;
    EXPECT_EQ(count(text, "rank "), 1) << entry.path() << ": " << text;
  }
  EXPECT_EQ(logs, 6);
}

TEST_F(Standby, AsManyAsWaitAreUsedAndTheOthersAreStarted) {
  auto job = start_job("train", {"--max-restarts=1", "--standby=1"});
  job->await_output(" stood by 0 ", 2);
  ASSERT_NO_FATAL_FAILURE(await_standby(1));
  kill_worker(0);
  job->await_output("rank 0 of 2 local 0 restart 1 stood by 1 ");
  job->await_output("rank 1 of 2 local 1 restart 1 stood by 0 ");
  stop();
  EXPECT_EQ(job->finish().exit_code, 0) << job->err();
}

TEST_F(Standby, RankZeroGetsTheLaunchersInputAndAllTheirThreadsAndCores) {
  auto job = start_job("train",
                       {"--max-restarts=1", "--standby=2", "--omp-threads=2",
                        "--numa-binding=core-complex"},
                       "one two");
  job->await_output(" stood by 0 ", 2);
  std::ofstream(scratch() / "reads") << "yes\n";
  const auto words_after = [&](const std::string& from) {
    const std::string& out = job->out();
    const size_t at = out.find(" threads ", out.find(from));
    return out.substr(at, out.find(" mark ", at) - at);
  };
  ASSERT_NO_FATAL_FAILURE(await_standby(2));
  kill_worker(1);
  job->await_output(" stood by 1 ", 2);
  job->await_output(" input one");
  EXPECT_THAT(job->out(), HasSubstr(" stood by 1 sum 3 threads 2 "));
  EXPECT_EQ(words_after("local 0 restart 0"), words_after("local 0 restart 1"));
  EXPECT_EQ(words_after("local 1 restart 0"), words_after("local 1 restart 1"));
  stop();
  EXPECT_EQ(job->finish().exit_code, 0) << job->err();
}

// The group of the next attempt is made while the workers of this one end, but
// nobody leaves init_process_group() before they are gone.
TEST_F(Standby, MeetWhileTheWorkersBeforeThemEnd) {
  auto job = start_job("slow", {"--max-restarts=1", "--standby=2", "--log-dir",
                                (scratch() / "logs").string(), "--tee=3"});
  job->await_output(" stood by 0 ", 2);
  ASSERT_NO_FATAL_FAILURE(await_standby(2));
  kill_worker(1);
  job->await_output("restart 1 stood by 1 ", 2);
  stop();
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, " ended 1\n"), 2) << result.out;
  EXPECT_EQ(read_file(scratch() / "ended"), "saw it\n");
  EXPECT_THAT(result.err, HasSubstr("restart 1 of 1, with 2 from standby on "
                                    "this node\n"));
}

TEST_F(Standby, AWorkerThatWaitsInInitProcessGroupIsKept) {
  const auto logs = scratch() / "logs";
  auto job = start_job("absent", {"--max-restarts=1", "--standby=1",
                                  "--log-dir", logs.string(), "--tee=3"});
  job->await_output("early ", 2);
  const json kept = status()["workers"][0]["pid"];
  await_in_init(kept.get<pid_t>());
  std::ofstream(scratch() / "go") << "now\n";
  job->await_output("restart 1 stood by 0 ", 2);
  EXPECT_EQ(status()["workers"][0]["pid"], kept);
  stop();
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("restart 1 of 1, with 1 kept in init_process_group() "
                        "on this node\n"));
  // Rank 1 twice, rank 0 once.
  EXPECT_EQ(count(result.out, "early "), 3) << result.out;
  EXPECT_THAT(result.out,
              HasSubstr("rank 0 of 2 local 0 restart 1 stood by 0 sum 3 "));
  EXPECT_THAT(result.out,
              HasSubstr("/attempt_1/0/error.json pid " + kept.dump() + " "));
  // Its output goes to the log files of the attempt in which it is written.
  for (const auto& [attempt, text] :
       {std::pair("attempt_0", "early "), std::pair("attempt_1", "rank 0 ")}) {
    std::string log;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(logs)) {
      if (entry.path().string().ends_with(std::string(attempt) +
                                          "/0/stdout.log")) {
        log = read_file(entry.path());
      }
    }
    EXPECT_EQ(log.substr(0, std::string(text).size()), text) << attempt;
    EXPECT_EQ(count(log, "\n"), 1) << log;
  }
}

// A bug: its exit code was read, though it runs.
TEST_F(Standby, AWorkerThatIsKeptHasNotEnded) {
  auto job = start_job("lingers",
                       {"--max-restarts=1", "--standby=1", "--nproc-per-node=3",
                        "--failure-shutdown-timeout=60"});
  job->await_output("early ", 3);
  const pid_t kept = pid_of(0);
  await_in_init(kept);
  std::ofstream(scratch() / "go") << "now\n";
  const Deadline deadline = Deadline::after(seconds(60));
  json worker;
  while (!deadline.expired() && worker["rank"] != -1) {
    worker = status()["workers"][0];
  }
  EXPECT_EQ(worker["rank"], -1);
  EXPECT_TRUE(worker["exit_code"].is_null()) << worker;
  std::ofstream(scratch() / "seen") << "now\n";
  job->await_output(" restart 1 ", 3);
  EXPECT_EQ(pid_of(0), kept);
  stop();
  EXPECT_EQ(job->finish().exit_code, 0) << job->err();
}

using StandbyNodes = NodesTest;

TEST_F(StandbyNodes, AWorkerWhosePlaceIsGoneIsNotKept) {
  const auto start_node = [&](const std::vector<std::string>& environment) {
    return start({"--nnodes=1:2", "--rdzv-endpoint=" + endpoint(),
                  "--rdzv-conf=join_timeout=120,last_call_timeout=60",
                  "--standby=1", kRank, "absent", scratch().string()},
                 {.environment = environment});
  };
  const auto stays = start_node({});
  await_store();
  const auto leaves = start_node({"LOCKSTEP_TEST_ABSENT=1"});
  leaves->await_output("early ");
  stays->await_output("early ");
  const pid_t worker =
      std::stoi(stays->out().substr(std::string("early ").size()));
  await_in_init(worker);
  leaves->signal(SIGTERM);
  EXPECT_EQ(leaves->finish(seconds(60)).exit_code, 128 + SIGTERM);
  stays->await_output("rank 0 of 1 ");
  std::ofstream(scratch() / "stop") << "now\n";
  const auto result = stays->finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("membership change 1"));
  // In a world of two it was rank 0 or 1 of 2.
  EXPECT_EQ(count(result.out, "early "), 2) << result.out;
}

TEST_F(Standby, AProgramThatAsksForItsRankFirstIsRefusedInOneLine) {
  auto job = start_job("early", {"--max-restarts=1", "--standby=2"});
  job->await_error(
      "--standby has no effect from here on: the program asks for LOCAL_RANK "
      "before init_process_group()");
  EXPECT_EQ(status()["standby"], 0);
  kill_worker(0);
  job->await_output("restart 1 stood by 0 ", 2);
  stop();
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "--standby"), 1) << result.err;
  EXPECT_THAT(result.err, Not(HasSubstr("from standby")));
}

TEST_F(Standby, AProgramThatEndsWithoutAGroupIsStartedOnce) {
  auto job = start_job("ends", {"--max-restarts=1", "--standby=2"});
  job->await_error(
      "--standby has no effect from here on: the program came to its end "
      "without init_process_group()");
  stop();
  EXPECT_EQ(job->finish().exit_code, 0) << job->err();
  EXPECT_EQ(count(job->err(), "--standby"), 1) << job->err();
}

TEST_F(Standby, OneThatDiesIsReportedOnceAndReplacedMoreAndMoreSlowly) {
  auto job = start_job("dies", {"--max-restarts=1", "--standby=2"});
  job->await_error(
      "a standby process ended before it had a place: exit code 3; its last "
      "line: no luck; another is started in 1 s");
  const auto begin = std::chrono::steady_clock::now();
  const auto starts = [&] {
    return count(read_file(scratch() / "starts"), "one");
  };
  const Deadline deadline = Deadline::after(seconds(60));
  while (starts() < 3 && !deadline.expired()) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_EQ(starts(), 3);
  // 1 s and 2 s, each less what had passed when the line was read.
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(2000));
  stop();
  const auto result = job->finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "a standby process"), 1) << result.err;
}

TEST_F(Standby, OneThatIsStoppedContinuesWhenItGetsAPlace) {
  auto job = start_job("train", {"--max-restarts=1", "--standby=2"});
  job->await_output(" stood by 0 ", 2);
  ASSERT_NO_FATAL_FAILURE(await_standby(2));
  for (const pid_t pid : marked_processes()) {
    const std::string environment =
        read_file("/proc/" + std::to_string(pid) + "/environ");
    if (environment.find("LOCKSTEP_STANDBY=") != std::string::npos) {
      ::kill(pid, SIGSTOP);
    }
  }
  kill_worker(0);
  job->await_output("restart 1 stood by 1 ", 2);
  stop();
  EXPECT_EQ(job->finish().exit_code, 0) << job->err();
}

TEST_F(Standby, OneThatIsKilledWhileItWaitsIsReplaced) {
  auto job = start_job("train", {"--max-restarts=1", "--standby=1"});
  job->await_output(" stood by 0 ", 2);
  ASSERT_NO_FATAL_FAILURE(await_standby(1));
  const json before = status()["workers"][0]["pid"];
  for (const pid_t pid : marked_processes()) {
    const std::string environment =
        read_file("/proc/" + std::to_string(pid) + "/environ");
    if (environment.find("LOCKSTEP_STANDBY=") != std::string::npos) {
      ::kill(pid, SIGKILL);
    }
  }
  job->await_error(
      "a standby process ended before it had a place: killed by "
      "SIGKILL");
  ASSERT_NO_FATAL_FAILURE(await_standby(1));
  EXPECT_EQ(status()["workers"][0]["pid"], before);  // no worker was touched
  kill_worker(0);
  job->await_output("restart 1 stood by 1 ");
  stop();
  EXPECT_EQ(job->finish().exit_code, 0) << job->err();
}

// A bug: the agent took a whole core from the workers until the other one
// waited.
TEST_F(Standby, OneThatDiesWhileAnotherComesKeepsNoCoreBusy) {
  auto job = start_job("second", {"--max-restarts=1", "--standby=2"});
  job->await_output(" stood by 0 ", 2);
  ASSERT_NO_FATAL_FAILURE(await_standby(1));
  const std::string starts = (scratch() / "starts").string();
  const Deadline deadline = Deadline::after(seconds(60));
  while (lines(read_file(starts)).size() < 2 && !deadline.expired()) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  ASSERT_EQ(lines(read_file(starts)).size(), 2u);
  ASSERT_EQ(::kill(std::stoi(lines(read_file(starts))[0]), SIGKILL), 0);
  job->await_error("a standby process ended before it had a place");
  const std::string agent =
      stat_fields(status()["workers"][0]["pid"].get<pid_t>())[3];
  // The next one could be started after 1 s.
  std::this_thread::sleep_for(milliseconds(1200));
  const auto ticks = [&] {
    const auto fields = stat_fields(std::stoi(agent));
    return std::stol(fields[13]) + std::stol(fields[14]);
  };
  const long before = ticks();
  std::this_thread::sleep_for(seconds(1));
  EXPECT_LT(ticks() - before, sysconf(_SC_CLK_TCK) / 4);
  std::ofstream(scratch() / "go") << "now\n";
  ASSERT_NO_FATAL_FAILURE(await_standby(2));
  stop();
  EXPECT_EQ(job->finish().exit_code, 0) << job->err();
}

TEST_F(Standby, DiesWithTheLauncher) {
  auto job = start_job("train", {"--max-restarts=1", "--standby=2"});
  job->await_output(" stood by 0 ", 2);
  ASSERT_NO_FATAL_FAILURE(await_standby(2));
  job->signal(SIGKILL);
  EXPECT_TRUE(await_no_process(seconds(60)));
  job->finish();
}

TEST_F(Standby, ProgramsThatCannotStandByAreRefused) {
  std::ofstream(scratch() / "train.py") << "import torch\n";
  const std::string script = (scratch() / "train.py").string();
  const std::string reason =
      "--standby is for C++ programs that call Lockstep's "
      "init_process_group(), where a standby process waits, and ";
  const auto refused = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"--standby=1", "--max-restarts=1"});
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    return result.err;
  };
  EXPECT_THAT(refused({"true"}), HasSubstr(reason + "/"));
  EXPECT_THAT(refused({script}), HasSubstr(reason));
  EXPECT_THAT(refused({"-m", "json.tool"}), HasSubstr(reason));
  EXPECT_THAT(refused({"sh", "-c", "exit 0"}), HasSubstr(reason));
  EXPECT_THAT(refused({kRank, "train", "$local_rank"}),
              HasSubstr("the program's arguments hold $local_rank"));
  EXPECT_THAT(run({"--standby=x", "true"}).err,
              HasSubstr("--standby is \"x\""));
}

}  // namespace
}  // namespace lockstep::internal::testing
