// The rules of docs/elastic.md, one by one, with agents that are processes:
// nodes that come and go between MIN and MAX.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "lockstep/base/deadline.h"
#include "tests/harness/network_hosts.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// A worker that says where it is and stays until the test ends the job.
std::string placed(const std::filesystem::path& end) {
  return "echo agent $PPID place $GROUP_RANK of $GROUP_WORLD_SIZE restarts "
         "$TORCHELASTIC_RESTART_COUNT.; until [ -e " +
         end.string() + " ]; do sleep 0.02; done";
}

class Elastic : public NodesTest {
 protected:
  // Starts a node of a job with 2 to 3 nodes.
  RunningProgram& start_node(const std::string& script,
                             std::vector<std::string> options = {}) {
    nodes_.push_back(start_script(
        with({"--nnodes=2:3", "--rdzv-endpoint=" + endpoint(),
              "--rdzv-conf=join_timeout=" + std::to_string(join_timeout_) +
                  ",last_call_timeout=" + last_call_},
             options),
        script));
    return *nodes_.back();
  }
  // Starts `count` nodes, of which the first hosts the store, and waits until
  // all run.
  void begin(int count, const std::string& script,
             const std::vector<std::string>& options = {}) {
    for (int one = 0; one < count; ++one) {
      start_node(script, options);
      if (one == 0) await_store();
    }
    for (auto& one : nodes_) {
      one->await_output("of " + std::to_string(count) + " ");
    }
  }
  RunningProgram& node(size_t which) { return *nodes_[which]; }

  // Returns the last "place P" in a worker's output.
  static std::string place_of(const RunningProgram& node) {
    const auto at = node.out().rfind("place ");
    return at == std::string::npos ? "none" : node.out().substr(at + 6, 1);
  }

  // Returns how many connections there are at the port of the agents' store.
  int connections_to_store() const {
    std::ostringstream here;
    here << ':' << std::uppercase << std::hex << port();
    int connections = 0;
    for (const auto& line : lines(read_file("/proc/net/tcp6"))) {
      // "SL: LOCAL_ADDRESS:PORT REMOTE_ADDRESS:PORT STATE ..."; 01: established
      std::istringstream fields(line);
      std::string number, local, remote, state;
      fields >> number >> local >> remote >> state;
      connections += local.ends_with(here.str()) && state == "01";
    }
    return connections;
  }

  void end_all_well() {
    std::ofstream(end_).put('.');
    for (auto& one : nodes_) {
      const auto result = one->finish(seconds(20));
      EXPECT_EQ(result.exit_code, 0) << result.err;
    }
  }

  std::filesystem::path end_ = scratch() / "end";
  // Long, so that a test can only pass because an agent was told.
  int join_timeout_ = 120;
  std::string last_call_ = "0";
  std::vector<std::unique_ptr<RunningProgram>> nodes_;
};

TEST_F(Elastic, JobBeginsWithMaxNodesAtOnce) {
  last_call_ = "80";
  begin(3, placed(end_));
  end_all_well();
}

TEST_F(Elastic, JobBeginsWithMinNodesAfterTheLastCall) {
  last_call_ = "1";
  begin(2, placed(end_));
  end_all_well();
}

TEST_F(Elastic, KilledNodeIsDoneWithoutAndCostsNoRestart) {
  begin(3, placed(end_));
  const std::string first = place_of(node(0));
  const std::string kept = place_of(node(2));
  kill(agent_of(node(1)), SIGKILL);
  EXPECT_EQ(node(1).finish(seconds(25)).exit_code, 128 + SIGKILL);
  nodes_.erase(nodes_.begin() + 1);
  for (auto& one : nodes_) {
    one->await_output("of 2 restarts 0.");
    one->await_error("membership change 1");
    EXPECT_THAT(
        one->err(),
        ContainsRegex("node [012] \\([^)]*\\) was lost: its connection"));
  }
  if (first != "2") {
    EXPECT_EQ(place_of(node(0)), first) << "a survivor keeps it";
  }
  if (kept != "2") {
    EXPECT_EQ(place_of(node(1)), kept) << "a survivor keeps it";
  }
  end_all_well();
}

TEST_F(Elastic, TheSameByC10d) {
  const std::vector<std::string> options{"--rdzv-backend=c10d",
                                         "--scale-up-wait=0"};
  begin(3, placed(end_), options);
  kill(agent_of(node(1)), SIGKILL);
  node(1).finish(seconds(25));
  nodes_.erase(nodes_.begin() + 1);
  for (auto& one : nodes_) one->await_output("of 2 restarts 0.");
  start_node(placed(end_), options);
  node(0).await_output("of 3 restarts 0.", 2);
  for (auto& one : nodes_) one->await_output("of 3 restarts 0.");
  end_all_well();
}

// Workers that know nothing of error files die of the loss of a peer before any
// agent has noticed the loss.
TEST_F(Elastic, FailuresThatALostNodeCausesUseNoRestart) {
  const auto dead = scratch() / "dead";
  const std::string script = placed(end_) + " & until [ -e " + end_.string() +
                             " ]; do [ -e " + dead.string() +
                             " ] && [ $GROUP_WORLD_SIZE = 3 ] && exit 5; "
                             "sleep 0.02; done; wait";
  begin(3, script);
  kill(agent_of(node(1)), SIGKILL);
  std::ofstream(dead).put('.');
  node(1).finish(seconds(25));
  nodes_.erase(nodes_.begin() + 1);
  for (auto& one : nodes_) one->await_output("of 2 restarts 0.");
  end_all_well();
}

TEST_F(Elastic, KilledLauncherIsDoneWithout) {
  begin(3, placed(end_));
  node(1).signal(SIGKILL);
  node(1).finish(seconds(25));
  nodes_.erase(nodes_.begin() + 1);
  for (auto& one : nodes_) one->await_output("of 2 restarts 0.");
  end_all_well();
}

TEST_F(Elastic, PausedNodeIsDoneWithoutAndComesBack) {
  begin(3, placed(end_),
        {"--scale-up-wait=0",
         "--rdzv-conf=join_timeout=120,"
         "last_call_timeout=0,keep_alive_interval=1,"
         "keep_alive_max_attempt=3"});
  const pid_t agent = agent_of(node(1));
  kill(agent, SIGSTOP);
  for (const size_t one : {0u, 2u}) {
    node(one).await_output("of 2 restarts 0.");
    node(one).await_error("no sign of life for 3 s");
  }
  kill(agent, SIGCONT);
  for (auto& one : nodes_) one->await_output("of 3 restarts 0.");
  node(0).await_output("of 3 restarts 0.", 2);
  end_all_well();
}

TEST_F(Elastic, BelowMinTheJobWaitsAndSaysSo) {
  begin(2, placed(end_));
  kill(agent_of(node(1)), SIGKILL);
  node(1).finish(seconds(25));
  nodes_.pop_back();
  node(0).await_error("waiting for 2 to 3 nodes, of which 1 has come");
  start_node(placed(end_));
  node(0).await_output("of 2 restarts 0.", 2);
  node(1).await_output("of 2 restarts 0.");
  end_all_well();
}

TEST_F(Elastic, BelowMinTheJobEndsWhenItsTimeIsUp) {
  join_timeout_ = 2;
  begin(2, placed(end_));
  kill(agent_of(node(1)), SIGKILL);
  node(1).finish(seconds(25));
  const auto result = node(0).finish(seconds(20));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("waited 2 s"));
  EXPECT_THAT(result.err, HasSubstr("for 2 to 3 nodes, of which 1 has come"));
}

TEST_F(Elastic, SignalToOneNodeMakesItLeaveAndTheOthersGoOn) {
  // This takes longer than --failure-shutdown-timeout.
  const std::string saves =
      "trap 'sleep 1; echo saved; exit 0' TERM; " + placed(end_);
  begin(3, saves);
  node(1).signal(SIGTERM);
  const auto left = node(1).finish(seconds(25));
  EXPECT_EQ(left.exit_code, 128 + SIGTERM) << left.err;
  EXPECT_THAT(left.out, HasSubstr("saved"));
  nodes_.erase(nodes_.begin() + 1);
  for (auto& one : nodes_) {
    one->await_output("of 2 restarts 0.");
    EXPECT_THAT(one->out(), HasSubstr("saved")) << "all had the time";
    EXPECT_THAT(one->err(), HasSubstr("leaves: SIGTERM"));
  }
  end_all_well();
}

TEST_F(Elastic, SignalToTheHostOfTheStoreEndsTheJob) {
  begin(3, placed(end_));
  node(0).signal(SIGTERM);
  for (auto& one : nodes_) {
    EXPECT_EQ(one->finish(seconds(25)).exit_code, 128 + SIGTERM);
  }
}

TEST_F(Elastic, SignalToAllNodesEndsThemAllInOneWay) {
  begin(3, placed(end_));
  for (auto& one : nodes_) one->signal(SIGTERM);
  for (auto& one : nodes_) {
    EXPECT_EQ(one->finish(seconds(25)).exit_code, 128 + SIGTERM);
  }
}

TEST_F(Elastic, FailureUsesARestartOnAllNodesAlike) {
  const std::string script = placed(end_) +
                             " & [ $TORCHELASTIC_RESTART_COUNT$RANK = 01 ] && "
                             "{ sleep 0.3; exit 3; }; wait";
  begin(2, script, {"--max-restarts=1"});
  for (auto& one : nodes_) {
    one->await_output("of 2 restarts 1.");
    one->await_error("restart 1 of 1");
  }
  end_all_well();
}

TEST_F(Elastic, ChangesAndRestartsAreCountedApart) {
  const auto fail = scratch() / "fail";
  const std::string script = placed(end_) + " & until [ -e " + end_.string() +
                             " ]; do [ $RANK = 1 ] && [ -e " + fail.string() +
                             " ] && { rm " + fail.string() +
                             "; exit 3; }; sleep 0.02; done; wait";
  begin(3, script, {"--max-restarts=1", "--max-membership-changes=1"});
  std::ofstream(fail).put('.');
  for (auto& one : nodes_) one->await_output("of 3 restarts 1.");
  kill(agent_of(node(2)), SIGKILL);
  node(2).finish(seconds(25));
  nodes_.pop_back();
  for (auto& one : nodes_) {
    one->await_output("of 2 restarts 1.");
    one->await_error("membership change 1 of 1");
  }
  // A node that comes now has no change left, and the next loss is too much.
  start_node(script, {"--max-restarts=1", "--max-membership-changes=1"});
  node(2).await_error("all 1 membership changes are used");
  kill(agent_of(node(1)), SIGKILL);
  node(1).finish(seconds(25));
  for (const size_t one : {0u, 2u}) {
    const auto result = node(one).finish(seconds(25));
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err,
                AllOf(HasSubstr("was lost"),
                      HasSubstr("membership changes used: 1 of 1")));
  }
}

TEST_F(Elastic, NodeThatFailsOftenIsLeftOutAndTriedAgain) {
  const std::vector<std::string> options{
      "--max-restarts=5", "--leave-out-after=1:60:2", "--scale-up-wait=0"};
  const auto bad = scratch() / "bad";
  const std::string fails = placed(end_) + " & until [ -e " + end_.string() +
                            " ]; do [ -e " + bad.string() + " ] && { rm " +
                            bad.string() +
                            "; exit 3; }; sleep 0.02; done; wait";
  start_node(placed(end_), options);
  await_store();
  start_node(fails, options);
  start_node(placed(end_), options);
  for (auto& one : nodes_) one->await_output("of 3 restarts 0.");
  std::ofstream(bad).put('.');
  for (const size_t one : {0u, 2u}) node(one).await_output("of 2 restarts 1.");
  node(0).await_error("the node is left out for 2 s");
  for (auto& one : nodes_) one->await_output("of 3 restarts 1.");
  EXPECT_EQ(count(node(1).out(), "place"), 2);
  end_all_well();
}

TEST_F(Elastic, NodeThatComesIsLetInAfterATime) {
  const std::string script = "trap 'echo saved; exit 0' TERM; " + placed(end_);
  begin(2, script, {"--scale-up-wait=1"});
  start_node(script, {"--scale-up-wait=1"});
  node(0).await_error("waits to take part");
  for (auto& one : nodes_) one->await_output("of 3 restarts 0.");
  for (const size_t old : {0u, 1u}) {
    EXPECT_THAT(node(old).out(), HasSubstr("saved"));
    EXPECT_EQ(place_of(node(old)), std::to_string(old)) << "they keep it";
  }
  end_all_well();
}

// A program of Lockstep tells of its snapshots by itself.
TEST_F(Elastic, NodeThatComesIsLetInAfterTheNextSnapshot) {
  const std::string script =
      "exec " LOCKSTEP_BIN_DIR "/tests/elastic_worker " + scratch().string();
  const std::vector<std::string> options{"--scale-up-wait=3600"};
  begin(2, script, options);
  start_node(script, options);
  node(0).await_error("waits to take part");
  EXPECT_EQ(count(node(0).out(), "saved"), 0);
  std::ofstream(scratch() / "save").put('.');
  for (auto& one : nodes_) one->await_output("of 3 ");
  for (const size_t old : {0u, 1u}) {
    EXPECT_THAT(node(old).out(), HasSubstr("saved"));
  }
  end_all_well();
}

TEST_F(Elastic, NodeThatComesWaitsLongerThanTheJobTakes) {
  begin(2, placed(end_));
  auto& late = start_node(placed(end_));
  late.await_error("the job runs without this node");
  end_all_well();
  EXPECT_THAT(
      late.err(),
      AllOf(ContainsRegex("after a time, at .*, where another node hosts "),
            HasSubstr("has ended well without this node")));
  EXPECT_EQ(late.out(), "");
  EXPECT_EQ(count(node(0).out(), "place"), 1) << "nobody was disturbed";
}

// It waits for a place for some seconds, and the job ends meanwhile.
// Regression: it then hosted a store of its own, and ran the whole job again
// alone.
TEST_F(Elastic, NodeTooManyDoesNotRunTheJobAgain) {
  const std::vector<std::string> options{"--nnodes=1:2"};
  last_call_ = "80";
  begin(2, placed(end_), options);
  const int before = connections_to_store();
  auto& late = start_node(placed(end_), options);
  const Deadline deadline = Deadline::after(seconds(20));
  while (connections_to_store() == before && !deadline.expired()) {
    ::usleep(10'000);
  }
  ::usleep(1'000'000);  // the job stays full while the node looks again
  std::ofstream(end_).put('.');
  for (const size_t one : {0u, 1u}) {
    EXPECT_EQ(node(one).finish(seconds(20)).exit_code, 0) << node(one).err();
  }
  const auto result = late.finish(seconds(40));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("is one too many"));
  EXPECT_EQ(result.out, "");
}

TEST_F(Elastic, KilledHostOfTheStoreIsOneLineOnEveryNode) {
  begin(3, placed(end_));
  const std::string lost = place_of(node(0));
  kill(agent_of(node(0)), SIGKILL);
  for (const size_t one : {1u, 2u}) {
    const auto result = node(one).finish(seconds(25));
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    EXPECT_THAT(result.err,
                AllOf(HasSubstr("node " + lost + " ("), HasSubstr("was lost"),
                      HasSubstr(endpoint())));
  }
  node(0).finish(seconds(25));
}

// With another endpoint the survivors meet there.
class ElasticMoves : public Elastic {
 protected:
  std::string both() const {
    return endpoint() + ",127.0.0.1:" + std::to_string(second_port_);
  }
  void begin_at_both(int count, const std::vector<std::string>& more = {}) {
    options_ = with({"--rdzv-endpoint=" + both()}, more);
    begin(count, placed(end_), options_);
  }

  int second_port_ = free_port();
  std::vector<std::string> options_;
};

TEST_F(ElasticMoves, KilledHostOfTheStoreIsDoneWithout) {
  begin_at_both(3);
  const std::string lost = place_of(node(0));
  const std::string kept = place_of(node(1));
  kill(agent_of(node(0)), SIGKILL);
  node(0).finish(seconds(25));
  nodes_.erase(nodes_.begin());
  for (auto& one : nodes_) {
    one->await_output("of 2 restarts 0.");
    EXPECT_THAT(one->err(),
                AllOf(HasSubstr("node " + lost + " ("), HasSubstr("was lost"),
                      HasSubstr("the nodes meet at 127.0.0.1:"),
                      HasSubstr("membership change 1")));
  }
  if (kept == "1") {
    EXPECT_EQ(place_of(node(0)), "1") << "a survivor keeps it";
  }
  // A node that starts now finds the job there.
  start_node(placed(end_), with(options_, {"--scale-up-wait=0"}));
  node(2).await_error("the job runs without this node");
  end_all_well();
}

TEST_F(ElasticMoves, HostOfTheStoreMayLeave) {
  options_ = {"--rdzv-endpoint=" + both()};
  // This takes longer than --failure-shutdown-timeout, but for the node that
  // leaves.
  begin(3,
        "trap '[ $GROUP_RANK = 0 ] || sleep 1; echo saved; exit 0' TERM; " +
            placed(end_),
        options_);
  node(0).signal(SIGTERM);
  EXPECT_EQ(node(0).finish(seconds(25)).exit_code, 128 + SIGTERM);
  nodes_.erase(nodes_.begin());
  for (auto& one : nodes_) {
    one->await_output("of 2 restarts 0.");
    EXPECT_THAT(one->err(), HasSubstr("leaves: SIGTERM"));
    EXPECT_EQ(count(one->err(), "membership change 1"), 1) << one->err();
    EXPECT_THAT(one->out(), HasSubstr("saved")) << "all had the time";
  }
  end_all_well();
}

TEST_F(ElasticMoves, AfterTheLastEndpointTheyMeetAtTheFirst) {
  begin_at_both(3, {"--nnodes=1:3", "--scale-up-wait=0"});
  kill(agent_of(node(0)), SIGKILL);
  node(0).finish(seconds(25));
  nodes_.erase(nodes_.begin());
  for (auto& one : nodes_) one->await_output("of 2 restarts 0.");
  // Either node hosts the second store. If this one does not, the other does.
  kill(agent_of(node(0)), SIGKILL);
  node(0).finish(seconds(25));
  nodes_.erase(nodes_.begin());
  node(0).await_output("of 1 restarts 0.");
  const std::string moved = "the nodes meet at " + endpoint();
  if (count(node(0).err(), moved) == 0) {
    start_node(placed(end_), options_);
    for (auto& one : nodes_) one->await_output("of 2 restarts 0.");
    kill(agent_of(node(0)), SIGKILL);
    node(0).finish(seconds(25));
    nodes_.erase(nodes_.begin());
    node(0).await_output("of 1 restarts 0.");
  }
  EXPECT_THAT(node(0).err(), HasSubstr(moved));
  end_all_well();
}

TEST_F(ElasticMoves, PausedHostOfTheStoreFindsTheOthers) {
  begin_at_both(3, {"--scale-up-wait=0",
                    "--rdzv-conf=join_timeout=120,last_call_timeout=0,"
                    "keep_alive_interval=1,keep_alive_max_attempt=3"});
  const pid_t host = agent_of(node(0));
  kill(host, SIGSTOP);
  for (const size_t one : {1u, 2u}) {
    node(one).await_output("of 2 restarts 0.");
    EXPECT_THAT(node(one).err(), HasSubstr("no answer for 3 s"));
  }
  kill(host, SIGCONT);
  node(0).await_error("no other node is at " + endpoint());
  node(0).await_output("of 3 restarts 0.", 2);
  end_all_well();
  // A bug: the host told of one change twice.
  EXPECT_EQ(count(node(0).err(), "membership change 1"), 1) << node(0).err();
}

TEST_F(ElasticMoves, ChangesThatAreUsedUpEndTheJob) {
  begin_at_both(3, {"--max-membership-changes=0"});
  kill(agent_of(node(0)), SIGKILL);
  node(0).finish(seconds(25));
  for (const size_t one : {1u, 2u}) {
    const auto result = node(one).finish(seconds(25));
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    EXPECT_THAT(result.err, HasSubstr("membership changes used: 0 of 0"));
  }
}

TEST_F(ElasticMoves, FixedNumberOfNodesUsesARestartAndWaitsForAReplacement) {
  begin_at_both(2, {"--nnodes=2", "--max-restarts=1"});
  kill(agent_of(node(0)), SIGKILL);
  node(0).finish(seconds(25));
  nodes_.erase(nodes_.begin());
  node(0).await_error("restart 1 of 1");
  start_node(placed(end_), options_);
  for (auto& one : nodes_) one->await_output("of 2 restarts 1.");
  end_all_well();
}

// Two hosts, joined by a cable. The first hosts the first store.
class ElasticBetweenHosts : public NodesTest {
 protected:
  void SetUp() override {
    if (!hosts_.made()) GTEST_SKIP() << hosts_.obstacle();
  }
  void TearDown() override {
    nodes_.clear();
    NodesTest::TearDown();
  }
  RunningProgram& start_on(int host, const std::string& script) {
    const auto at = [](int where) {
      return NetworkHosts::address(where) + ":29400";  // in hexadecimal: 72D8
    };
    nodes_.push_back(start_program(
        with(with(hosts_.command_on(host),
                  {LOCKSTEP_BIN_DIR "/lockstep", "run", "--nnodes=2:3",
                   "--rdzv-endpoint=" + at(0) + "," + at(1),
                   "--rdzv-conf=join_timeout=120,keep_alive_interval=1,"
                   "keep_alive_max_attempt=3"}),
             {"sh", "-c", script})));
    return *nodes_.back();
  }

  NetworkHosts hosts_;
  std::vector<std::unique_ptr<RunningProgram>> nodes_;
};

TEST_F(ElasticBetweenHosts, CutCableLeadsToARoundOfTheOtherHost) {
  const auto end = scratch() / "end";
  const std::string script =
      "echo place $GROUP_RANK of $GROUP_WORLD_SIZE at $MASTER_ADDR.; until [ "
      "-e " +
      end.string() + " ]; do sleep 0.02; done";
  start_on(0, script);
  // Otherwise the others may have met at the second endpoint before.
  const auto listens =
      start_program(with(hosts_.command_on(0),
                         {"sh", "-c",
                          "until grep -q ':72D8 [0-9A-F:]* 0A' /proc/net/tcp "
                          "/proc/net/tcp6; do sleep 0.02; done"}));
  ASSERT_EQ(listens->finish(seconds(60)).exit_code, 0);
  for (const int host : {1, 1}) start_on(host, script);
  for (auto& one : nodes_) {
    one->await_output("of 3 at " + NetworkHosts::address(0) + ".");
  }
  ASSERT_TRUE(hosts_.unplug());
  for (const size_t one : {1u, 2u}) {
    nodes_[one]->await_output("of 2 at " + NetworkHosts::address(1) + ".");
    EXPECT_THAT(nodes_[one]->err(), HasSubstr("was lost"));
  }
  // Alone, the other half does not go on.
  nodes_[0]->await_error("was lost");
  EXPECT_EQ(count(nodes_[0]->out(), "place"), 1);
  nodes_[0]->signal(SIGTERM);
  EXPECT_EQ(nodes_[0]->finish(seconds(25)).exit_code, 128 + SIGTERM);
  std::ofstream(end).put('.');
  for (const size_t one : {1u, 2u}) {
    EXPECT_EQ(nodes_[one]->finish(seconds(20)).exit_code, 0);
  }
}

TEST_F(Elastic, NodeThatWaitsIsNotPromisedAPlaceIfAllChangesAreUsed) {
  const std::vector<std::string> options{"--max-membership-changes=0",
                                         "--scale-up-wait=0"};
  begin(2, placed(end_), options);
  start_node(placed(end_), options);
  node(2).await_error("all 0 membership changes are used");
  end_all_well();
  EXPECT_EQ(count(node(0).err(), "take part"), 0) << node(0).err();
  EXPECT_EQ(count(node(2).err(), "snapshot"), 0) << node(2).err();
}

// A node that cannot run the program must not end a job that runs.
TEST_F(Elastic, NodeThatCannotStartEndsOnlyItself) {
  begin(2, placed(end_), {"--scale-up-wait=0"});
  auto broken = start(
      {"--nnodes=2:3", "--rdzv-endpoint=" + endpoint(), "/no/such/program"});
  EXPECT_EQ(broken->finish(seconds(20)).exit_code, 127);
  end_all_well();
  EXPECT_EQ(count(node(0).out(), "place"), 1);
}

// Groups of one node: no other is needed.
TEST_F(Elastic, OneNodeIsEnoughIfMinIsOne) {
  const auto alone =
      start_script({"--nnodes=1:2", "--rdzv-endpoint=" + endpoint(),
                    "--rdzv-conf=last_call_timeout=0"},
                   "echo place $GROUP_RANK of $GROUP_WORLD_SIZE");
  const auto result = alone->finish(seconds(20));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "place 0 of 1\n");
}

}  // namespace
}  // namespace lockstep::internal::testing
