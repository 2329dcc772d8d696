// Several nodes on hosts that are really separate: two network namespaces
// joined by a cable. Making them needs root; otherwise the test skips visibly.
#include <gmock/gmock.h>
#include <signal.h>

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
  void start_on(int host, int node_rank, const std::string& script) {
    auto command = with(
        with(hosts_.command_on(host), {LOCKSTEP_BIN_DIR "/lockstep", "run"}),
        meeting(NetworkHosts::address(0) + ":29400", 2, node_rank));
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

TEST_F(NodesBetweenHosts, UnpluggedHostsNameEachOther) {
  for (const int host : {0, 1}) {
    start_on(host, host, "echo ready; exec sleep 300");
  }
  for (auto& one : nodes_) one->await_output("ready\n");
  ASSERT_TRUE(hosts_.unplug());
  // Each host reports the loss within 5 s. An agent that is only stopped has
  // more time, because its host still acknowledges.
  const Deadline deadline = Deadline::after(seconds(5));
  for (const size_t host : {0u, 1u}) {
    node(host).await_error("was lost", deadline.remaining());
  }
  const auto second = node(1).finish(seconds(15));
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.err, AllOf(HasSubstr("node 0 ("), HasSubstr("was lost")));
  const auto first = node(0).finish(seconds(15));
  EXPECT_EQ(first.exit_code, 1);
  EXPECT_THAT(first.err, AllOf(HasSubstr("node 1 ("), HasSubstr("was lost")));
}

}  // namespace
}  // namespace lockstep::internal::testing
