// Faults 4, 6, 11 and 25 over several nodes: deaths of workers, agents,
// launchers and of the store's host; restarts; signals.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "lockstep/base/endpoint.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// A worker that stays, and prints what the tests need to know.
const std::string kStay = "echo agent $PPID; exec sleep 300";

class NodesFaults : public NodesTest {
 protected:
  // Starts two nodes and waits for their workers. Node 0 hosts the store.
  void start_two(std::vector<std::string> options, const std::string& script,
                 const std::string& ready) {
    std::string conf = "--rdzv-conf=";
    if (!options.empty() && options.back().starts_with(conf)) {
      conf = options.back() + ",";
      options.pop_back();
    }
    for (int rank = 0; rank < 2; ++rank) {
      const std::string hosts = rank == 0 ? "true" : "false";
      nodes_.push_back(start_script(
          with(with(meeting(endpoint(), 2, rank, backend_), options),
               {conf + "join_timeout=30,is_host=" + hosts}),
          script));
    }
    for (auto& node : nodes_) node->await_output(ready);
  }
  RunningProgram& node(size_t rank) { return *nodes_[rank]; }

  std::string backend_ = "lockstep";
  std::vector<std::unique_ptr<RunningProgram>> nodes_;
};

// The settings that depend on the store.
class NodesFaultsAtAStore : public NodesFaults,
                            public ::testing::WithParamInterface<const char*> {
 protected:
  NodesFaultsAtAStore() { backend_ = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(, NodesFaultsAtAStore,
                         ::testing::Values("lockstep", "c10d"),
                         [](const auto& one) {
                           return std::string(one.param);
                         });

TEST_F(NodesFaults, EveryAgentEndsWithTheFirstFailingWorkersCode) {
  start_two({"--nproc-per-node=2"},
            "echo agent; [ $RANK = 3 ] && { sleep 0.3; exit 42; }; "
            "exec sleep 300",
            "agent");
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto result = node(rank).finish(seconds(25));
    EXPECT_EQ(result.exit_code, 42) << result.err;
    EXPECT_THAT(result.err, HasSubstr("rank 3 failed on node 1 ("));
    // The node of the failure knows the local rank, too.
    EXPECT_EQ(count(result.err, "local rank 1"), rank == 1 ? 1 : 0);
  }
}

std::string write_record(const std::string& kind, std::string message = {}) {
  if (message.empty()) message = "an " + kind;
  return "echo '{\"message\": {\"message\": \"" + message +
         "\", \"extraInfo\": {\"timestamp\": \"1700000000\", \"kind\": \"" +
         kind + "\"}}}' > $TORCHELASTIC_ERROR_FILE; ";
}

// Returns a script: rank 1 fails, then does `ending`; rank 0 fails with exit
// code 7 as an echo of that.
std::string cause_and_echo(const std::filesystem::path& scratch,
                           const std::string& ending) {
  const std::string thrown = (scratch / "thrown").string();
  return "echo agent; [ $RANK = 0 ] && { until [ -e " + thrown +
         " ]; do sleep 0.01; done; " + write_record("echo") + "exit 7; }; " +
         write_record("cause") + "touch " + thrown + "; " + ending;
}

// The echo ends earlier than its cause, and on another node.
TEST_F(NodesFaults, CauseOnAnotherNodeIsNamed) {
  start_two({}, cause_and_echo(scratch(), "sleep 0.4; exit 9"), "agent");
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(25));
    EXPECT_EQ(result.exit_code, 9) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 failed on node 1 ("),
                                  HasSubstr("an cause")));
    // The lines say which node wrote them and when, for a log of all nodes.
    EXPECT_THAT(result.err,
                ContainsRegex("lockstep run \\[[^ ]+ 20[0-9-]+ [0-9:.]+\\]: "));
  }
}

// The rank that the echo names says nothing itself, and has ended well or runs.
TEST_F(NodesFaults, RankThatAVictimOnAnotherNodeNamesIsTheCause) {
  for (const char* ending : {"exit 0", "exec sleep 60"}) {
    nodes_.clear();
    const auto thrown = scratch() / (ending + std::to_string(port()));
    start_two({},
              "echo agent; [ $RANK = 0 ] && { until [ -e '" + thrown.string() +
                  "' ]; do sleep 0.01; done; " +
                  write_record("echo", "rank 1 has left the group") +
                  "exit 7; }; touch '" + thrown.string() + "'; " + ending,
              "agent");
    for (auto& one : nodes_) {
      const auto result = one->finish(seconds(20));
      EXPECT_EQ(result.exit_code, 1) << result.err;
      EXPECT_THAT(result.err,
                  AllOf(HasSubstr("]: rank 1 "), HasSubstr("on node 1 ("),
                        HasSubstr("rank 1 has left the group")));
    }
  }
}

// Rank 1 catches its exception and tidies up for longer than any agent waits.
TEST_F(NodesFaults, CauseThatStillRunsOnAnotherNodeIsNamed) {
  start_two({}, cause_and_echo(scratch(), "exec sleep 60"), "agent");
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(20));
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 failed on node 1 ("),
                                  HasSubstr("an cause")));
  }
}

TEST_P(NodesFaultsAtAStore, FailureOnOneNodeRestartsAllOnAFreshStore) {
  start_two({"--nproc-per-node=2", "--max-restarts=3"},
            "echo round $TORCHELASTIC_RESTART_COUNT $MASTER_PORT; "
            "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; "
            // The fault is on one node in the first attempt, on the other in
            // the next.
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
    const auto result = one->finish(seconds(25));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "round 0\nround 1\n");
  }
}

TEST_F(NodesFaults, ProgramThatOneHostCannotExecuteEndsAll) {
  auto first = start_script(meeting(endpoint(), 2, 0), kStay);
  // The file exists and is executable, but has a format that the kernel does
  // not know.
  const auto garbage = scratch() / "garbage";
  FileDescriptor file(open(garbage.c_str(), O_WRONLY | O_CREAT, 0755));
  ASSERT_EQ(write(file.get(), "\x01\x02 no program\n", 14), 14);
  file.reset();
  auto second = start(with(meeting(endpoint(), 2, 1), {garbage}));
  EXPECT_EQ(second->finish(seconds(25)).exit_code, 126);
  const auto result = first->finish(seconds(25));
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
        const auto result = node(rank).finish(seconds(25));
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

// A scheduler may send the signal to clean up after a failure.
TEST_F(NodesFaults, SignalAfterAFailureDoesNotChangeTheExitCode) {
  start_two({},
            "trap 'echo stopping' TERM; echo ready; "
            "[ $RANK = 1 ] && { sleep 0.5; exit 42; }; "
            "while :; do sleep 0.02; done",
            "ready");
  node(0).await_output("stopping");
  node(0).signal(SIGTERM);
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(25));
    EXPECT_EQ(result.exit_code, 42) << result.err;
    EXPECT_THAT(result.err, HasSubstr("rank 1 failed on node 1 ("));
  }
}

TEST_F(NodesFaults, SignalWhileWaitingForNodesEndsTheWait) {
  auto single = start_script(meeting(endpoint(), 2, 0), "echo never");
  await_store();
  single->signal(SIGTERM);
  const auto result = single->finish(seconds(25));
  EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
  EXPECT_EQ(result.out, "");
}

// A scheduler suspends and continues the whole job, or only one agent is
// paused. Only a pause of a peer that other processes of its host do not share
// counts.
TEST_P(NodesFaultsAtAStore, PauseOfFiveSecondsIsNobodysDeath) {
  const auto end = scratch() / "end";
  const std::string script = "echo agent $PPID; until [ -e " + end.string() +
                             " ]; do sleep 0.05; done; echo done";
  struct Job {
    std::string endpoint;
    std::string mark;
    std::vector<std::unique_ptr<RunningProgram>> nodes{};
  };
  std::vector<Job> jobs;
  for (const char* name : {"all", "agent0", "agent1"}) {
    Job& job = jobs.emplace_back(Job{"[::1]:" + std::to_string(free_port()),
                                     std::string("JOB=") + name});
    for (int rank = 0; rank < 2; ++rank) {
      job.nodes.push_back(start_script(meeting(job.endpoint, 2, rank, backend_),
                                       script, {.environment = {job.mark}}));
    }
    for (auto& node : job.nodes) node->await_output("agent ");
  }
  auto paused = marked_processes({jobs[0].mark});
  ASSERT_GE(paused.size(), 6u) << "launchers, agents and workers";
  paused.push_back(agent_of(*jobs[1].nodes[0]));
  paused.push_back(agent_of(*jobs[2].nodes[1]));
  for (const pid_t pid : paused) kill(pid, SIGSTOP);
  std::this_thread::sleep_for(seconds(5));  // the pause
  for (const pid_t pid : paused) kill(pid, SIGCONT);
  // An agent that had given up another one would have reported it by now.
  std::this_thread::sleep_for(seconds(2));
  std::ofstream(end).put('.');
  for (auto& job : jobs) {
    for (auto& node : job.nodes) {
      const auto result = node->finish(seconds(20));
      EXPECT_EQ(result.exit_code, 0) << job.mark;
      EXPECT_EQ(result.err, "") << job.mark;
      EXPECT_EQ(count(result.out, "done\n"), 1) << job.mark;
    }
  }
}

// A bug: a node that was paused when the job ended found no store any more, and
// failed though the job had succeeded.
TEST_P(NodesFaultsAtAStore, NodeThatIsPausedAtTheEndLearnsHowTheJobEnded) {
  const auto end = scratch() / "end";
  start_two({},
            "echo agent $PPID; [ $GROUP_RANK = 1 ] && exit 0; until [ -e " +
                end.string() + " ]; do sleep 0.02; done",
            "agent ");
  const pid_t agent = agent_of(node(1));
  // The agent has no child any more once it has seen the end of its worker.
  const std::string children = "/proc/" + std::to_string(agent) + "/task/" +
                               std::to_string(agent) + "/children";
  const auto has_child = [&] {
    std::string words;
    std::ifstream(children) >> words;
    return !words.empty();
  };
  while (has_child()) std::this_thread::sleep_for(std::chrono::milliseconds(9));
  // It tells node 0, where nothing shows that.
  std::this_thread::sleep_for(seconds(1));
  kill(agent, SIGSTOP);
  std::ofstream(end).put('.');
  node(0).await_error("knows that the job has ended");
  std::this_thread::sleep_for(seconds(5));
  kill(agent, SIGCONT);
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(20));
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

TEST_P(NodesFaultsAtAStore, PausedAgentIsGivenUpWhenItsTimeIsUpAndSaysSo) {
  const std::string times = "keep_alive_interval=0.5,keep_alive_max_attempt=4";
  start_two({"--rdzv-conf=" + times}, kStay, "agent ");
  const pid_t agent = agent_of(node(1));
  kill(agent, SIGSTOP);
  const auto result = node(0).finish(seconds(20));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("node 1 ("),
                    HasSubstr("has shown no sign of life for 2 s")));
  kill(agent, SIGCONT);
  const auto paused = node(1).finish(seconds(20));
  EXPECT_EQ(paused.exit_code, 1);
  EXPECT_THAT(paused.err, HasSubstr("itself did not run for"));
}

// A cluster may replace a pod: the node comes again while the others wait.
TEST_F(NodesFaults, LostNodeUsesUpARestartAndMayBeReplaced) {
  for (const bool ranked : {true, false}) {
    nodes_.clear();
    const std::string script =
        "echo agent $PPID round $TORCHELASTIC_RESTART_COUNT rank $RANK of "
        "$WORLD_SIZE; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; "
        "exec sleep 300";
    const std::string where = "[::1]:" + std::to_string(free_port());
    const auto start_node = [&](int rank) {
      return start_script(
          with(meeting(where, 2, ranked ? rank : -1),
               {"--max-restarts=1", "--rdzv-conf=join_timeout=60"}),
          script);
    };
    nodes_.push_back(start_node(0));
    await_store(where);
    nodes_.push_back(start_node(1));
    for (auto& one : nodes_) one->await_output("round 0");
    kill(agent_of(node(1)), SIGKILL);
    EXPECT_EQ(node(1).finish(seconds(25)).exit_code, 128 + SIGKILL);
    auto replacement = start_node(1);
    for (auto* one : {&node(0), replacement.get()}) {
      const auto result = one->finish(seconds(30));
      EXPECT_EQ(result.exit_code, 0) << result.err;
      EXPECT_EQ(count(result.out, "round 1"), 1) << result.out;
    }
    EXPECT_EQ(count(replacement->out(), "round 0"), 0);
  }
}

TEST_F(NodesFaults, LostNodeIsNamedBeforeTheOthersWaitForItsReplacement) {
  start_two({"--max-restarts=1"}, kStay, "agent ");
  node(1).signal(SIGKILL);
  node(0).await_error("restart 1 of 1");
  node(0).signal(SIGTERM);
  const auto result = node(0).finish(seconds(25));
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.err, AllOf(HasSubstr("launcher of node 1 ("),
                                HasSubstr("was killed")));
  node(1).finish(seconds(25));
}

TEST_P(NodesFaultsAtAStore, KilledAgentIsNamedWithinSeconds) {
  start_two({}, kStay, "agent ");
  kill(agent_of(node(1)), SIGKILL);
  const auto result = node(0).finish(seconds(25));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("node 1 ("));
  EXPECT_THAT(result.err, HasSubstr("was lost"));
  EXPECT_EQ(node(1).finish(seconds(25)).exit_code, 128 + SIGKILL);
}

TEST_P(NodesFaultsAtAStore, KilledHostOfTheStoreIsNamedAtOnce) {
  start_two({"--max-restarts=3"}, kStay, "agent ");
  kill(agent_of(node(0)), SIGKILL);
  const auto result = node(1).finish(seconds(25));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("node 0 ("), HasSubstr("was lost"),
                                HasSubstr(endpoint())));
  EXPECT_EQ(node(0).finish(seconds(25)).exit_code, 128 + SIGKILL);
}

TEST_P(NodesFaultsAtAStore, PausedHostOfTheStoreIsGivenUpAndSaysSo) {
  start_two({"--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"},
            kStay, "agent ");
  const pid_t host = agent_of(node(0));
  kill(host, SIGSTOP);
  const auto result = node(1).finish(seconds(20));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("node 0 ("), HasSubstr("no answer for 3 s")));
  kill(host, SIGCONT);
  const auto paused = node(0).finish(seconds(20));
  EXPECT_EQ(paused.exit_code, 1);
  EXPECT_THAT(paused.err, HasSubstr("itself did not run for"));
}

TEST_F(NodesFaults, KilledLauncherEndsTheOtherNodeAtOnce) {
  start_two({}, kStay, "agent ");
  node(1).signal(SIGKILL);
  const auto result = node(0).finish(seconds(25));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(result.err, AllOf(HasSubstr("launcher of node 1 ("),
                                HasSubstr("was killed")));
  node(1).finish(seconds(25));
}

// Fault 21: strangers reach the port of a job that runs.
TEST_F(NodesFaults, StrangersAtTheStoreDoNotDisturbTheJob) {
  const auto end = scratch() / "end";
  start_two({},
            "echo agent $PPID; until [ -e " + end.string() +
                " ]; do sleep 0.02; done",
            "agent ");
  const auto store = resolve(parse_endpoint("endpoint", endpoint(), 0)).front();
  std::vector<FileDescriptor> strangers;
  for (const std::string& words :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100'000, '\xff'),
        std::string("\x16\x03\x01"), std::string()}) {
    for (int turn = 0; turn < 150; ++turn) {
      FileDescriptor stranger = connect_to(store, seconds(20));
      ASSERT_TRUE(stranger);
      // An error of send() does not matter: the store may have closed already.
      [[maybe_unused]] auto sent =
          send(stranger.get(), words.data(), words.size(), MSG_NOSIGNAL);
      strangers.push_back(std::move(stranger));
    }
  }
  // A node that comes meanwhile is served: it is told that it is one too many.
  auto late = start_script(meeting(endpoint(), 2), "true");
  const auto refused = late->finish(seconds(20));
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("one too many"));
  std::ofstream(end).put('.');
  for (auto& one : nodes_) {
    const auto result = one->finish(seconds(25));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
