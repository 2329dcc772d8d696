// Several nodes on hosts that are really separate: two network namespaces
// joined by a cable. Making them needs root; otherwise the test skips visibly.
#include <gmock/gmock.h>
#include <signal.h>

#include <fstream>
#include <functional>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/harness/network_hosts.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

class NodesBetweenHosts : public NodesTest {
 protected:
  void SetUp() override {
    if (!hosts_.made()) GTEST_SKIP() << hosts_.obstacle();
  }

  void TearDown() override {
    nodes_.clear();
    NodesTest::TearDown();
  }

  // Starts `lockstep run` with one worker on a host, as node(host).
  void start_on(int host, int node_rank, const std::string& script,
                const std::vector<std::string>& options = {}) {
    auto command = with(
        with(hosts_.command_on(host), {LOCKSTEP_BIN_DIR "/lockstep", "run"}),
        with(meeting(NetworkHosts::address(0) + ":29400", 2, node_rank),
             options));
    nodes_.push_back(start_program(with(command, {"sh", "-c", script})));
  }
  RunningProgram& node(size_t host) { return *nodes_[host]; }

  NetworkHosts hosts_;
  std::vector<std::unique_ptr<RunningProgram>> nodes_;
};

// Rank 0 listens as its store would; the other rank connects.
const std::string kMeet =
    "echo $MASTER_ADDR; exec python3 -c '\n"
    "import os, socket, time\n"
    "place = (os.environ[\"MASTER_ADDR\"], int(os.environ[\"MASTER_PORT\"]))\n"
    "if os.environ[\"RANK\"] == \"0\":\n"
    "    listening = socket.socket()\n"
    "    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "    listening.bind((\"\", place[1]))\n"
    "    listening.listen()\n"
    "    listening.settimeout(20)\n"
    "    listening.accept()\n"
    "else:\n"
    "    end = time.monotonic() + 20\n"
    "    while True:\n"
    "        try:\n"
    "            socket.create_connection(place, 20)\n"
    "            break\n"
    "        except ConnectionRefusedError:\n"
    "            if time.monotonic() > end: raise\n"
    "            time.sleep(0.02)\n"
    "'";

// The peers of a rank on the other host see only that its connection broke.
TEST_F(NodesBetweenHosts, CauseThatTidiesUpIsNamedBeforeItsEchoes) {
  for (const char* backend : {"lockstep", "gloo"}) {
    for (const int odd : {1, 0}) {
      SCOPED_TRACE(std::string(backend) + " " + std::to_string(odd));
      nodes_.clear();
      for (const int host : {0, 1}) {
        start_on(host, host,
                 std::string("exec " LOCKSTEP_BIN_DIR
                             "/tests/faults_departing inside ") +
                     backend + " tidies=700 odd=" + std::to_string(odd));
      }
      for (const size_t host : {0u, 1u}) {
        const auto result = node(host).finish();
        EXPECT_EQ(result.exit_code, 1) << result.err;
        const auto rank = std::to_string(odd);
        EXPECT_THAT(result.err,
                    HasSubstr("]: rank " + rank + " failed on node " + rank));
        EXPECT_THAT(result.err, HasSubstr("an exception left the scope of"));
      }
    }
  }
}

TEST_F(NodesBetweenHosts, WorkersMeetWhereNodeZeroIs) {
  // Node rank 0 is first on the host of the agents' store, then on the other
  // one.
  for (const int rank_of_first : {0, 1}) {
    nodes_.clear();
    start_on(0, rank_of_first, kMeet);
    start_on(1, 1 - rank_of_first, kMeet);
    for (const size_t host : {0u, 1u}) {
      const auto result = node(host).finish();
      EXPECT_EQ(result.exit_code, 0) << result.err;
      EXPECT_EQ(result.out,
                NetworkHosts::address(rank_of_first == 0 ? 0 : 1) + "\n");
      EXPECT_EQ(result.err, "");
    }
  }
}

// An address that is local on both hosts, as a virtual one is: each node hosts
// a store. They waited for each other in silence.
TEST_F(NodesBetweenHosts, AddressThatBothHostsHaveIsNamedWhileTheyWait) {
  for (const int host : {0, 1}) {
    auto command = with(hosts_.command_on(host),
                        {"ip", "address", "add", "192.0.2.9/32", "dev", "lo"});
    ASSERT_EQ(run_program(command).exit_code, 0);
    command = with(hosts_.command_on(host),
                   {LOCKSTEP_BIN_DIR "/lockstep", "run", "--nnodes=2",
                    "--rdzv-endpoint=192.0.2.9:29400", "true"});
    nodes_.push_back(start_program(command));
  }
  for (const size_t host : {0u, 1u}) {
    node(host).await_error("each of them hosts a store of its own",
                           seconds(60));
    EXPECT_THAT(node(host).err(),
                AllOf(HasSubstr("at 192.0.2.9:29400, where this node hosts the "
                                "agents' store on every interface"),
                      HasSubstr("192.0.2.9 is on lo")));
    node(host).signal(SIGTERM);
    EXPECT_EQ(node(host).finish(seconds(60)).exit_code, 128 + SIGTERM);
  }
}

// Every line about a wait says where, which node hosts the store, the way there
// and what the system said last.
TEST_F(NodesBetweenHosts, LinesOfWaitingNodesSayWhere) {
  start_on(1, 1, "true");
  const std::string store = NetworkHosts::address(0);
  const std::string own = NetworkHosts::address(1);
  node(0).await_error("waiting for the agents' store at " + store + ":29400",
                      seconds(60));
  EXPECT_THAT(
      node(0).err(),
      AllOf(HasSubstr("(Connection refused)"),
            HasSubstr("another node hosts the agents' store, at " + store +
                      "; this node's way there is from " + own + " on ")));
  node(0).signal(SIGTERM);
  node(0).finish(seconds(60));
  nodes_.clear();
  start_on(0, 0, "true", {"--nnodes=3"});
  start_on(1, 1, "true", {"--nnodes=3"});
  const std::string waiting =
      "waiting for node 2 of 3, for at most 600 s, at " + store +
      ":29400, where ";
  node(0).await_error(waiting +
                          "this node hosts the agents' store on every "
                          "interface; " +
                          store + " is on ",
                      seconds(60));
  node(1).await_error(waiting + "another node hosts the agents' store, at ",
                      seconds(60));
  for (auto& one : nodes_) one->signal(SIGTERM);
  for (auto& one : nodes_) one->finish(seconds(60));
}

TEST_F(NodesBetweenHosts, UnpluggedHostsNameEachOther) {
  for (const int host : {0, 1}) {
    start_on(host, host, "echo ready; exec sleep 300",
             {"--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2"});
  }
  for (auto& one : nodes_) one->await_output("ready\n");
  ASSERT_TRUE(hosts_.unplug());
  const Deadline deadline = Deadline::after(seconds(25));
  for (const size_t host : {0u, 1u}) {
    node(host).await_error("was lost", deadline.remaining());
  }
  const auto second = node(1).finish(seconds(60));
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.err, AllOf(HasSubstr("node 0 ("), HasSubstr("was lost")));
  const auto first = node(0).finish(seconds(60));
  EXPECT_EQ(first.exit_code, 1);
  EXPECT_THAT(first.err, AllOf(HasSubstr("node 1 ("), HasSubstr("was lost")));
}

// Fault 31, with ranks that reduce all the time.
TEST_F(NodesBetweenHosts, CollectivesGoOnAfterACut) {
  for (const int host : {0, 1}) {
    start_on(host, host,
             "exec " LOCKSTEP_BIN_DIR
             "/tests/faults_rank loop lockstep timeout=600000 end=1");
  }
  for (auto& one : nodes_) one->await_output("turn ");
  ASSERT_TRUE(hosts_.unplug());
  node(1).await_error("no contact with node 0");
  // The connections of the ranks have nothing acknowledged either.
  std::this_thread::sleep_for(seconds(3));
  const auto turns = count(node(0).out(), "turn ");
  ASSERT_TRUE(hosts_.plug_in(0, 1));
  node(1).await_error("is back after");
  node(0).await_output("turn ", static_cast<int>(turns) + 20);
  node(0).signal(SIGTERM);
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(60));
    EXPECT_EQ(result.exit_code, 128 + SIGTERM);
    EXPECT_EQ(count(result.out, "failed"), 0) << result.out;
  }
}

// Three hosts, each joined to the others, with a node of one job on each. The
// agent on host 0 hosts the store.
class CutJob {
 public:
  using Start = std::function<std::unique_ptr<RunningProgram>(
      const std::vector<std::string>& command)>;

  // Starts the nodes with `options`. A worker says "attempt N of M nodes" and
  // ends when the file `end` exists.
  CutJob(const Start& start, std::filesystem::path end,
         const std::vector<std::string>& options)
      : end_(std::move(end)) {
    for (int host = 0; host < kHosts; ++host) {
      std::vector<std::string> command = hosts_.command_on(host);
      for (const std::string& word :
           {std::string(LOCKSTEP_BIN_DIR "/lockstep"), std::string("run")}) {
        command.push_back(word);
      }
      command.insert(command.end(), options.begin(), options.end());
      command.insert(command.end(),
                     {"sh", "-c",
                      "echo attempt $TORCHELASTIC_RESTART_COUNT of "
                      "$GROUP_WORLD_SIZE nodes agent $PPID; until [ -e " +
                          end_.string() + " ]; do sleep 0.05; done"});
      nodes_.push_back(start(command));
      if (host == 0) await_listener(start);
    }
    for (auto& node : nodes_) node->await_output("attempt 0 of 3 nodes");
  }

  // Waits until the store on host 0 listens: the port is 72D8 in hexadecimal.
  void await_listener(const Start& start) {
    auto command = hosts_.command_on(0);
    command.insert(command.end(),
                   {"sh", "-c",
                    "until grep -q ':72D8 [0-9A-F:]* 0A' /proc/net/tcp "
                    "/proc/net/tcp6; do sleep 0.02; done"});
    EXPECT_EQ(start(command)->finish(seconds(60)).exit_code, 0);
  }

  const NetworkHosts& hosts() const { return hosts_; }
  RunningProgram& node(size_t host) { return *nodes_[host]; }
  void await_all(const std::string& words, int times = 1) {
    for (auto& node : nodes_) node->await_output(words, times);
  }
  void end() { std::ofstream(end_).put('.'); }

  static constexpr int kHosts = 3;

 private:
  NetworkHosts hosts_{kHosts};
  std::filesystem::path end_;
  std::vector<std::unique_ptr<RunningProgram>> nodes_{};
};

// Returns the only child of an agent, its worker.
pid_t child_of(pid_t agent) {
  const std::string task = std::to_string(agent);
  pid_t child = 0;
  std::ifstream("/proc/" + task + "/task/" + task + "/children") >> child;
  EXPECT_GT(child, 1);
  return child;
}

// Nodes of three hosts that meet at host 0.
class NetworkCuts : public NodesTest {
 protected:
  void SetUp() override {
    const NetworkHosts probe;
    if (!probe.made()) GTEST_SKIP() << probe.obstacle();
  }
  void TearDown() override {
    jobs_.clear();
    NodesTest::TearDown();
  }

  static std::string at(int host) {
    return NetworkHosts::address(host) + ":29400";
  }
  CutJob& start_job(const std::vector<std::string>& more = {},
                    const std::string& nnodes = "3",
                    const std::string& backend = "lockstep",
                    const std::string& endpoints = at(0)) {
    const auto options =
        with({"--nnodes=" + nnodes, "--rdzv-backend=" + backend,
              "--rdzv-endpoint=" + endpoints, "--rdzv-id=cut"},
             more);
    jobs_.push_back(std::make_unique<CutJob>(
        [this](const auto& command) { return start_program(command); },
        scratch() / ("end" + std::to_string(jobs_.size())), options));
    return *jobs_.back();
  }

  std::vector<std::unique_ptr<CutJob>> jobs_;
};

void cut_off(const NetworkHosts& hosts, int host) {
  for (int other = 0; other < CutJob::kHosts; ++other) {
    EXPECT_TRUE(other == host || hosts.unplug(host, other));
  }
}
void join_again(const NetworkHosts& hosts, int host) {
  for (int other = 0; other < CutJob::kHosts; ++other) {
    EXPECT_TRUE(other == host || hosts.plug_in(host, other));
  }
}

// Fault 31. The network is cut in five jobs at once: of a node, of the host of
// the store, and one way.
TEST_F(NetworkCuts, OfTwentySecondsEndNoWorker) {
  const std::vector<std::string> none;
  CutJob& node = start_job({"--max-restarts=3"});
  CutJob& host = start_job();
  // Its nodes could move to the second endpoint.
  CutJob& movable = start_job(none, "3", "lockstep", at(0) + "," + at(1));
  CutJob& towards = start_job();
  CutJob& back = start_job();
  CutJob& elastic = start_job(none, "2:3");
  CutJob& c10d = start_job(none, "3", "c10d");
  cut_off(node.hosts(), 2);
  cut_off(host.hosts(), 0);
  cut_off(movable.hosts(), 0);
  ASSERT_TRUE(towards.hosts().lose_packets(1, 0));
  ASSERT_TRUE(back.hosts().lose_packets(0, 1));
  cut_off(elastic.hosts(), 1);
  cut_off(c10d.hosts(), 1);
  std::this_thread::sleep_for(seconds(20));
  join_again(node.hosts(), 2);
  join_again(host.hosts(), 0);
  join_again(movable.hosts(), 0);
  ASSERT_TRUE(towards.hosts().let_through(1, 0));
  ASSERT_TRUE(back.hosts().let_through(0, 1));
  join_again(elastic.hosts(), 1);
  join_again(c10d.hosts(), 1);
  // The agents say that they are in touch again.
  node.node(2).await_error("is back after");
  for (const size_t other : {1u, 2u}) {
    for (CutJob* job : {&host, &movable}) {
      job->node(other).await_error("no contact with node 0");
      job->node(other).await_error("is back after");
    }
  }
  c10d.node(1).await_error("no answer from ");
  towards.node(1).await_error("is back after");
  back.node(1).await_error("is back after");
  elastic.node(1).await_error("is back after");
  c10d.node(0).await_error("is back after");
  for (auto& job : jobs_) {
    job->end();
    for (size_t one = 0; one < CutJob::kHosts; ++one) {
      const auto result = job->node(one).finish(seconds(60));
      EXPECT_EQ(result.exit_code, 0) << result.err;
      EXPECT_EQ(count(result.out, "attempt"), 1) << result.err;
      EXPECT_LE(lines(result.err).size(), 4u) << result.err;
    }
  }
}

const std::string kShortTime =
    "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3";

// The node is lost, stops its workers by itself, and takes part in the restart
// as soon as it can.
TEST_F(NetworkCuts, ThatLastTooLongLeadToARestartThatTheNodeTakesPartIn) {
  CutJob& node = start_job({"--max-restarts=1", kShortTime});
  CutJob& host = start_job({"--max-restarts=1", kShortTime});
  cut_off(node.hosts(), 2);
  cut_off(host.hosts(), 0);
  node.node(0).await_error("was lost: its agent has shown no sign of life");
  for (const size_t lost : {1u, 2u}) {
    host.node(0).await_error("restart 1 of 1");
    host.node(lost).await_error("no answer for 3 s");
  }
  node.node(2).await_error("no answer for 3 s");
  node.node(0).await_error("restart 1 of 1");
  join_again(node.hosts(), 2);
  join_again(host.hosts(), 0);
  for (auto& job : jobs_) {
    job->await_all("attempt 1 of 3 nodes");
    job->end();
    for (size_t one = 0; one < CutJob::kHosts; ++one) {
      const auto result = job->node(one).finish(seconds(60));
      EXPECT_EQ(result.exit_code, 0) << result.err;
      EXPECT_EQ(count(result.out, "attempt"), 2) << result.err;
    }
  }
}

// The others do without the node, which comes back.
TEST_F(NetworkCuts, ThatLastTooLongAreTwoMembershipChanges) {
  const std::vector<std::string> options{"--scale-up-wait=0",
                                         kShortTime + ",last_call_timeout=0"};
  CutJob& one_endpoint = start_job(options, "2:3");
  CutJob& two_endpoints =
      start_job(options, "2:3", "lockstep", at(0) + "," + at(1));
  for (auto& job : jobs_) cut_off(job->hosts(), 2);
  for (auto& job : jobs_) {
    job->node(0).await_output("attempt 0 of 2 nodes");
    job->node(1).await_output("attempt 0 of 2 nodes");
    job->node(2).await_error("no answer for 3 s");
  }
  join_again(one_endpoint.hosts(), 2);
  join_again(two_endpoints.hosts(), 2);
  for (auto& job : jobs_) {
    job->node(0).await_output("attempt 0 of 3 nodes", 2);
    job->node(2).await_output("attempt 0 of 3 nodes", 2);
    job->end();
    for (size_t one = 0; one < CutJob::kHosts; ++one) {
      const auto result = job->node(one).finish(seconds(60));
      EXPECT_EQ(result.exit_code, 0) << result.err;
      // Loss and return.
      EXPECT_EQ(count(result.out, "attempt"), one == 2 ? 2 : 3) << result.err;
    }
    EXPECT_THAT(job->node(0).err(), HasSubstr("membership change 2"));
    EXPECT_EQ(count(job->node(0).err(), "membership change 3"), 0);
  }
}

// A worker fails while a node is cut off. The node hears of the restart when it
// is back.
TEST_F(NetworkCuts, ThatHealWhileARoundFormsLeaveNobodyOut) {
  CutJob& job = start_job({"--max-restarts=2"});
  cut_off(job.hosts(), 2);
  job.node(2).await_error("no contact with node 0");
  kill(child_of(agent_of(job.node(1))), SIGKILL);
  job.node(0).await_error("restart 1 of 2");
  join_again(job.hosts(), 2);
  job.await_all("attempt 1 of 3 nodes");
  job.end();
  for (size_t one = 0; one < CutJob::kHosts; ++one) {
    const auto result = job.node(one).finish(seconds(60));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.out, "attempt"), 2) << result.err;
  }
}

// A node that is cut off when the job ends learns how it ended.
TEST_F(NetworkCuts, AtTheEndOfTheJobEndAllNodesAlike) {
  CutJob& job = start_job();
  cut_off(job.hosts(), 2);
  job.node(2).await_error("no contact with node 0");
  job.end();
  // It still has to report that its workers succeeded. They end meanwhile.
  std::this_thread::sleep_for(seconds(1));
  join_again(job.hosts(), 2);
  for (size_t one = 0; one < CutJob::kHosts; ++one) {
    EXPECT_EQ(job.node(one).finish(seconds(60)).exit_code, 0);
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
