// FAULTS 4, 6, 11 and 25 over several nodes: death of workers, agents,
// launchers and of the store's host; restarts; signals.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "tests/launch/nodes.h"

namespace lockstep::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A worker that stays, and says what the tests need to know.
const std::string kStay = "echo agent $PPID; exec sleep 300";

class NodesFaults : public NodesTest {
 protected:
  // Two nodes whose workers run. Node 0 hosts the store.
  void start_two(const std::vector<std::string>& options,
                 const std::string& script, const std::string& ready) {
    for (int rank = 0; rank < 2; ++rank) {
      const std::string hosts = rank == 0 ? "true" : "false";
      nodes_.push_back(
          start_script(with(with(c10d(endpoint(), 2, rank), options),
                            {"--rdzv-conf=join_timeout=30,is_host=" + hosts}),
                       script));
    }
    for (auto& node : nodes_) node->await_output(ready);
  }
  RunningProgram& node(size_t rank) { return *nodes_[rank]; }

  std::vector<std::unique_ptr<RunningProgram>> nodes_;
};

TEST_F(NodesFaults, EveryAgentEndsWithTheFirstFailingWorkersCode) {
  start_two({"--nproc-per-node=2"},
            "echo agent; [ $RANK = 3 ] && { sleep 0.3; exit 42; }; "
            "exec sleep 300",
            "agent");
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto result = node(rank).finish(seconds(10));
    EXPECT_EQ(result.exit_code, 42) << result.err;
    EXPECT_THAT(result.err, HasSubstr("rank 3 failed on node 1 ("));
    // Where it was, more is known.
    EXPECT_EQ(count(result.err, "local rank 1"), rank == 1 ? 1 : 0);
  }
}

TEST_F(NodesFaults, FailureOnOneNodeRestartsAllOnAFreshStore) {
  start_two({"--nproc-per-node=2", "--max-restarts=3"},
            "echo round $TORCHELASTIC_RESTART_COUNT $MASTER_PORT; "
            "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; "
            // The fault is now on one node, now on the other.
            "[ $RANK = $((3 * (1 - TORCHELASTIC_RESTART_COUNT))) ] && "
            "{ sleep 0.3; exit 1; }; exec sleep 300",
            "round 2");
  std::vector<std::string> outputs;
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(20));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.err, "restarting all 4 workers"), 2) << result.err;
    auto all = lines(result.out);
    std::sort(all.begin(), all.end());
    ASSERT_EQ(all.size(), 6u) << result.out;
    EXPECT_EQ(all[0], all[1]);
    EXPECT_NE(all[1].substr(8), all[2].substr(8)) << "a port a round";
    outputs.push_back(all[0] + all[2] + all[4]);
  }
  EXPECT_EQ(outputs[0], outputs[1]) << "the same rounds, the same stores";
}

TEST_F(NodesFaults, NodeThatHasEndedWellStartsAnewWithTheOthers) {
  start_two({"--max-restarts=1"},
            "echo round $TORCHELASTIC_RESTART_COUNT; "
            "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; "
            "[ $RANK = 0 ] && exit 0; sleep 0.5; exit 5",
            "round 1");
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(10));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "round 0\nround 1\n");
  }
}

TEST_F(NodesFaults, ProgramThatOneHostCannotExecuteEndsAll) {
  auto first = start_script(c10d(endpoint(), 2, 0), kStay);
  // Found, executable, and of no format that the kernel knows.
  const auto garbage = scratch() / "garbage";
  FileDescriptor file(open(garbage.c_str(), O_WRONLY | O_CREAT, 0755));
  ASSERT_EQ(write(file.get(), "\x01\x02 no program\n", 14), 14);
  file.reset();
  auto second = start(with(c10d(endpoint(), 2, 1), {garbage}));
  EXPECT_EQ(second->finish(seconds(10)).exit_code, 126);
  const auto result = first->finish(seconds(10));
  EXPECT_EQ(result.exit_code, 126);
  EXPECT_THAT(result.err, AllOf(HasSubstr("node 1 ("), HasSubstr("garbage")));
}

TEST_F(NodesFaults, SignalToOneAgentEndsTheJob) {
  for (const int signal : {SIGTERM, SIGINT}) {
    for (const size_t target : {0u, 1u}) {
      nodes_.clear();
      start_two({"--max-restarts=3"},
                "trap 'echo saved; exit 0' TERM INT; echo ready; "
                "while :; do sleep 0.05; done",
                "ready");
      node(target).signal(signal);
      for (size_t rank = 0; rank < 2; ++rank) {
        const auto result = node(rank).finish(seconds(10));
        EXPECT_EQ(result.exit_code, 128 + signal) << result.err;
        EXPECT_THAT(result.out, HasSubstr("saved\n"));
        if (rank != target) {
          EXPECT_THAT(result.err,
                      HasSubstr("at node " + std::to_string(target) + " ("));
        }
      }
    }
  }
}

// As a scheduler that cleans up after a failure.
TEST_F(NodesFaults, SignalAfterAFailureDoesNotChangeTheExitCode) {
  start_two({},
            "trap 'echo stopping' TERM; echo ready; "
            "[ $RANK = 1 ] && { sleep 0.5; exit 42; }; "
            "while :; do sleep 0.02; done",
            "ready");
  node(0).await_output("stopping");
  node(0).signal(SIGTERM);
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(10));
    EXPECT_EQ(result.exit_code, 42) << result.err;
    EXPECT_THAT(result.err, HasSubstr("rank 1 failed on node 1 ("));
  }
}

TEST_F(NodesFaults, SignalWhileWaitingForNodesEndsTheWait) {
  auto lonely = start_script(c10d(endpoint(), 2, 0), "echo never");
  await_store();
  lonely->signal(SIGTERM);
  const auto result = lonely->finish(seconds(10));
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  EXPECT_EQ(result.out, "");
}

TEST_F(NodesFaults, KilledAgentIsNamedWithinSeconds) {
  start_two({"--max-restarts=3"}, kStay, "agent ");
  kill(agent_of(node(1)), SIGKILL);
  const auto result = node(0).finish(seconds(15));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("node 1 ("));
  EXPECT_THAT(result.err, HasSubstr("was lost"));
  EXPECT_EQ(node(1).finish(seconds(10)).exit_code, 128 + SIGKILL);
}

TEST_F(NodesFaults, KilledHostOfTheStoreIsNamedAtOnce) {
  start_two({"--max-restarts=3"}, kStay, "agent ");
  kill(agent_of(node(0)), SIGKILL);
  const auto result = node(1).finish(seconds(15));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("node 0 ("), HasSubstr("was lost"),
                                HasSubstr(endpoint())));
  EXPECT_EQ(node(0).finish(seconds(10)).exit_code, 128 + SIGKILL);
}

// As a host that is unplugged: its connections stay open and silent.
TEST_F(NodesFaults, SilentHostOfTheStoreIsGivenUp) {
  start_two({}, kStay, "agent ");
  const pid_t host = agent_of(node(0));
  kill(host, SIGSTOP);
  const auto result = node(1).finish(seconds(20));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("node 0 ("), HasSubstr("no answer for 3 s")));
  kill(host, SIGCONT);
  EXPECT_EQ(node(0).finish(seconds(20)).exit_code, 1);
}

TEST_F(NodesFaults, KilledLauncherEndsTheOtherNodeAtOnce) {
  start_two({"--max-restarts=3"}, kStay, "agent ");
  node(1).signal(SIGKILL);
  const auto result = node(0).finish(seconds(10));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(result.err, AllOf(HasSubstr("launcher of node 1 ("),
                                HasSubstr("was killed")));
  node(1).finish(seconds(10));
}

}  // namespace
}  // namespace lockstep::testing
