// Several nodes on hosts that are really apart: two network namespaces joined
// by a cable. Needs the right to make them (root); a visible skip without.
#include <gmock/gmock.h>
#include <signal.h>

#include <cstdlib>

#include "tests/launch/nodes.h"

namespace lockstep::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

class NodesBetweenHosts : public NodesTest {
 protected:
  void SetUp() override {
    const bool made =
        ip("netns add " + host_[0]) && ip("netns add " + host_[1]) &&
        ip("link add " + cable_[0] + " netns " + host_[0] +
           " type veth peer name " + cable_[1] + " netns " + host_[1]);
    if (!made) GTEST_SKIP() << "no right to make network namespaces";
    for (size_t one = 0; one < 2; ++one) {
      ASSERT_TRUE(ip("-n " + host_[one] + " addr add " + address(one) +
                     "/24 dev " + cable_[one]));
      ASSERT_TRUE(ip("-n " + host_[one] + " link set " + cable_[one] + " up"));
      ASSERT_TRUE(ip("-n " + host_[one] + " link set lo up"));
    }
  }

  void TearDown() override {
    nodes_.clear();
    NodesTest::TearDown();
    for (const auto& host : host_) ip("netns del " + host);
  }

  static bool ip(const std::string& arguments) {
    return std::system(("ip " + arguments + " >/dev/null 2>&1").c_str()) == 0;
  }

  static std::string address(size_t host) {
    return "198.18.0." + std::to_string(host + 1);
  }

  // `lockstep run` on one of the hosts, one worker. Becomes node(host).
  void start_on(size_t host, int node_rank, const std::string& script) {
    auto command =
        with({"/bin/sh", "-c", "exec \"$0\" \"$@\"", "ip", "netns", "exec",
              host_[host], LOCKSTEP_BIN_DIR "/lockstep", "run"},
             c10d(address(0) + ":29400", 2, node_rank));
    nodes_.push_back(start_program(with(command, {"sh", "-c", script})));
  }
  RunningProgram& node(size_t host) { return *nodes_[host]; }

  std::string id_ = std::to_string(getpid());
  std::string host_[2] = {"lockstep-a-" + id_, "lockstep-b-" + id_};
  std::string cable_[2] = {"lsa" + id_, "lsb" + id_};
  std::vector<std::unique_ptr<RunningProgram>> nodes_;
};

// Rank 0 listens as its store would; the other connects.
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

TEST_F(NodesBetweenHosts, WorkersMeetWhereNodeZeroIs) {
  // Node rank 0 once on the host of the agents' store, once on the other.
  for (const int rank_of_first : {0, 1}) {
    nodes_.clear();
    start_on(0, rank_of_first, kMeet);
    start_on(1, 1 - rank_of_first, kMeet);
    for (const size_t host : {0u, 1u}) {
      const auto result = node(host).finish();
      EXPECT_EQ(result.exit_code, 0) << result.err;
      EXPECT_EQ(result.out, address(rank_of_first == 0 ? 0 : 1) + "\n");
      EXPECT_EQ(count(result.err, "without authentication"), host == 0 ? 1 : 0)
          << result.err;
    }
  }
}

TEST_F(NodesBetweenHosts, UnpluggedHostsNameEachOther) {
  for (const size_t host : {0u, 1u}) {
    start_on(host, static_cast<int>(host), "echo ready; exec sleep 300");
  }
  for (auto& one : nodes_) one->await_output("ready\n");
  ASSERT_TRUE(ip("-n " + host_[0] + " link set " + cable_[0] + " down"));
  const auto second = node(1).finish(seconds(15));
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.err, AllOf(HasSubstr("node 0 ("), HasSubstr("was lost"),
                                HasSubstr("no answer")));
  const auto first = node(0).finish(seconds(15));
  EXPECT_EQ(first.exit_code, 1);
  EXPECT_THAT(first.err, AllOf(HasSubstr("node 1 ("), HasSubstr("was lost")));
}

}  // namespace
}  // namespace lockstep::testing
