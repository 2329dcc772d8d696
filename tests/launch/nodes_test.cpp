// `lockstep run` over several nodes: ranks, environment, rendezvous, mistakes.
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>
#include <thread>

#include "lockstep/base/endpoint.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Nodes : public NodesTest {
 protected:
  static std::vector<std::string> sorted_lines(const std::string& text) {
    auto all = lines(text);
    std::sort(all.begin(), all.end());
    return all;
  }
};

class NodesAtAStore : public Nodes,
                      public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(, NodesAtAStore, ::testing::Values("lockstep", "c10d"),
                         [](const auto& one) {
                           return std::string(one.param);
                         });

const std::string kPlace =
    "echo $GROUP_RANK/$GROUP_WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE "
    "$RANK/$WORLD_SIZE $ROLE_RANK/$ROLE_WORLD_SIZE $TORCHELASTIC_RUN_ID "
    "$TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_USE_AGENT_STORE "
    "${LOCKSTEP_MASTER_LISTEN_FD:+listens}";

// Runs the tutorial's command with another port.
TEST_F(Nodes, TwoNodesOfEightByC10dAtIpv6Loopback) {
  const auto options = [&](int rank) {
    return with(c10d(endpoint(), 2, rank),
                {"--rdzv-id=456", "--nproc_per_node=8"});
  };
  const std::string script =
      "echo $RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID";
  auto second = start_script(options(1), script);
  auto first = start_script(options(0), script);
  const auto results = {first->finish(), second->finish()};
  std::set<std::string> ranks;
  std::set<std::string> stores;
  for (const auto& result : results) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
    for (const auto& line : lines(result.out)) {
      ranks.insert(line.substr(0, line.find(' ')));
      stores.insert(line.substr(line.find(' ') + 1));
    }
  }
  EXPECT_EQ(ranks.size(), 16u);
  EXPECT_TRUE(ranks.count("15/16"));
  ASSERT_EQ(stores.size(), 1u);
  EXPECT_THAT(*stores.begin(), AllOf(HasSubstr("::1:"), HasSubstr(" 456")));
  EXPECT_EQ(stores.begin()->find(std::to_string(port())), std::string::npos)
      << "rank 0's store has a port of its own";
}

TEST_F(Nodes, UnevenNodesByTheStaticRendezvous) {
  const int workers[] = {1, 3, 2};
  std::vector<std::unique_ptr<RunningProgram>> nodes;
  for (int rank = 0; rank < 3; ++rank) {
    nodes.push_back(start_script(
        with(fixed(port(), 3, rank, "static"),
             {"--rdzv-id=job7",
              "--nproc-per-node=" + std::to_string(workers[rank])}),
        kPlace));
  }
  const std::vector<std::vector<std::string>> expected{
      {"0/3 0/1 0/6 0/6 job7 0 False listens"},
      {"1/3 0/3 1/6 1/6 job7 0 False", "1/3 1/3 2/6 2/6 job7 0 False",
       "1/3 2/3 3/6 3/6 job7 0 False"},
      {"2/3 0/2 4/6 4/6 job7 0 False", "2/3 1/2 5/6 5/6 job7 0 False"}};
  for (size_t rank = 0; rank < 3; ++rank) {
    const auto result = nodes[rank]->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(sorted_lines(result.out), expected[rank]) << "node " << rank;
    EXPECT_EQ(result.err.find("authentication"), std::string::npos)
        << "loopback needs no warning";
  }
}

TEST_F(Nodes, ArrivalDecidesWithoutNodeRanks) {
  std::vector<std::unique_ptr<RunningProgram>> nodes;
  for (int one = 0; one < 3; ++one) {
    nodes.push_back(start_script(
        meeting("127.0.0.1:" + std::to_string(port()), 3),
        "echo $GROUP_RANK $RANK $TORCHELASTIC_RUN_ID $MASTER_PORT"));
  }
  std::set<char> ranks;
  std::set<std::string> agreed;
  for (const auto& node : nodes) {
    const auto result = node->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    ASSERT_GT(result.out.size(), 4u) << result.err;
    EXPECT_EQ(result.out[0], result.out[2]);
    ranks.insert(result.out[0]);
    agreed.insert(result.out.substr(4));
  }
  EXPECT_EQ(ranks, (std::set<char>{'0', '1', '2'}));
  EXPECT_EQ(agreed.size(), 1u) << "one run id, one store";
}

TEST_F(Nodes, LocalAddrIsWhereTheOthersReachRankZero) {
  auto second = start_script(meeting(endpoint(), 2, 1), "echo $MASTER_ADDR");
  auto first = start_script(
      with(meeting(endpoint(), 2, 0), {"--local-addr=127.0.0.5"}), "true");
  EXPECT_EQ(second->finish().out, "127.0.0.5\n");
  EXPECT_EQ(first->finish().exit_code, 0);
}

TEST_F(Nodes, WorkersInheritNothingOfTheAgentsStore) {
  const std::string script =
      "for fd in /proc/self/fd/*; do case $(readlink $fd) in "
      "socket:*|anon_inode:*) echo $RANK ${fd##*/};; esac; done";
  auto second = start_script(meeting(endpoint(), 2, 1), script);
  auto first = start_script(meeting(endpoint(), 2, 0), script);
  EXPECT_EQ(lines(first->finish().out).size(), 1u) << "the held port";
  EXPECT_EQ(second->finish().out, "");
}

TEST_F(Nodes, PrefixTemplateKnowsTheGlobalRank) {
  const auto run = [&](int rank) {
    return start_script(
        with(fixed(port(), 2, rank), {"--nproc-per-node=2", "--prefix-lines",
                                      "--local-ranks-filter=1"}),
        "echo here",
        {.environment = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="
                         "${rank}.${local_rank}:"}});
  };
  auto first = run(0);
  auto second = run(1);
  EXPECT_EQ(first->finish().out, "1.1:here\n");
  EXPECT_EQ(second->finish().out, "3.1:here\n");
}

// A shell loop runs several jobs: one node's next agent may come while the
// store of the previous job still exists.
TEST_P(NodesAtAStore, JobsFollowEachOtherAtOneEndpoint) {
  const std::string command =
      std::string(LOCKSTEP_BIN_DIR) +
      "/lockstep run --nnodes=2 --rdzv-backend=" + GetParam() +
      " --rdzv-endpoint=" + endpoint();
  std::string loop = "for job in 1 2 3; do ";
  const auto node = [&](const std::string& rank) {
    return start_program({"/bin/sh", "-c",
                          loop + command +
                              " --rdzv-id=$job --node-rank=" + rank +
                              " sh -c 'echo $TORCHELASTIC_RUN_ID' || exit; "
                              "done"});
  };
  auto first = node("0");
  auto second = node("1");
  for (auto* one : {first.get(), second.get()}) {
    const auto result = one->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "1\n2\n3\n") << result.err;
  }
}

TEST_F(Nodes, AbsentNodeIsNamed) {
  const auto result = run_script(
      with(meeting(endpoint(), 3, 0), {"--rdzv-conf=join_timeout=1"}),
      "echo never");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("absent: nodes 1 and 2"));
  EXPECT_EQ(result.out, "");
}

TEST_F(Nodes, StoreThatNeverComesIsNamed) {
  const auto result = run_script(
      with(fixed(port(), 2, 1), {"--rdzv-conf=timeout=1"}), "echo never");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr("127.0.0.1:" + std::to_string(port())));
  EXPECT_EQ(result.out, "");
}

struct Disagreement {
  std::vector<std::string> first;
  std::vector<std::string> second;
  std::vector<std::string> said;
};

TEST_F(Nodes, DisagreementIsOneLineThatNamesBothAgents) {
  const std::vector<Disagreement> cases{
      {{"--nnodes=3", "--node-rank=1"},
       {"--nnodes=3", "--node-rank=1"},
       {"two agents have --node-rank=1"}},
      {{"--nnodes=3", "--node-rank=0"},
       {"--nnodes=2", "--node-rank=1"},
       {"--nnodes=2", "--nnodes=3"}},
      {{"--nnodes=3", "--node-rank=0", "--max-restarts=2"},
       {"--nnodes=3", "--node-rank=1", "--max-restarts=1"},
       {"--max-restarts=1", "--max-restarts=2"}},
      {{"--nnodes=3", "--node-rank=0", "--rdzv-id=one"},
       {"--nnodes=3", "--node-rank=1", "--rdzv-id=two"},
       {"--rdzv-id=one", "--rdzv-id=two"}},
  };
  // Starts all at once, because each host waits long for the nodes that never
  // come.
  std::vector<std::unique_ptr<RunningProgram>> nodes;
  for (const auto& one : cases) {
    const std::vector<std::string> where{"--rdzv-endpoint=[::1]:" +
                                         std::to_string(free_port())};
    nodes.push_back(start_script(with(where, one.first), "echo never"));
    nodes.push_back(start_script(with(where, one.second), "echo never"));
  }
  for (size_t at = 0; at < nodes.size(); ++at) {
    const auto result = nodes[at]->finish();
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    for (const auto& said : cases[at / 2].said) {
      EXPECT_THAT(result.err, HasSubstr(said));
    }
    // Both agents are named by their processes.
    EXPECT_EQ(count(result.err, "pid "), 2) << result.err;
    EXPECT_EQ(result.out, "");
  }
}

TEST_F(Nodes, PortOfTheStoreInUseIsOneLine) {
  auto taken = start_script(meeting(endpoint(), 2, 0), "true");
  await_store();
  // In the static rendezvous this node must host the store, but cannot.
  const auto result =
      run_script({"--nnodes=2", "--node-rank=0", "--master-addr=::1",
                  "--master-port=" + std::to_string(port())},
                 "true");
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr(endpoint()),
                                HasSubstr("another process listens")));
  taken->signal(SIGTERM);
  EXPECT_EQ(taken->finish().exit_code, 128 + SIGTERM);
}

TEST_F(Nodes, MissingModuleIsOneLine) {
  for (const char* backend : {"lockstep", "c10d"}) {
    const auto result =
        run_script(meeting(endpoint(), 2, 0, backend), "true",
                   {.environment = {"LOCKSTEP_MODULE_PATH=/no/modules"}});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    EXPECT_THAT(result.err,
                HasSubstr(std::string("/no/modules/") + backend + "_store.so"));
  }
}

TEST_F(Nodes, AgentsOfOurStoreDoNotLoadLibTorch) {
  const std::string script =
      "grep -c libtorch /proc/$PPID/maps; grep -c libssl /proc/$PPID/maps "
      "> /dev/null && echo tls";
  auto second = start_script(meeting(endpoint(), 2, 1), script);
  auto first = start_script(meeting(endpoint(), 2, 0), script);
  for (auto* one : {first.get(), second.get()}) {
    EXPECT_EQ(one->finish().out, "0\ntls\n");
  }
}

TEST_F(Nodes, WorkersDoNotGetTheSecret) {
  const std::string script = "echo ${LOCKSTEP_JOB_SECRET-none}";
  auto second = start_script(meeting(endpoint(), 2, 1), script);
  auto first = start_script(meeting(endpoint(), 2, 0), script);
  EXPECT_EQ(first->finish().out, "none\n");
  EXPECT_EQ(second->finish().out, "none\n");
}

// Fault 22. The stranger gives up; the node with the right secret then comes.
TEST_F(Nodes, NodeWithAnotherSecretIsRefusedAndTheJobGoesOn) {
  auto first = start_script(meeting(endpoint(), 2, 0), "echo ran");
  await_store();
  const auto secret = scratch() / "secret";
  std::ofstream(secret) << "the secret of another job\n";
  std::filesystem::permissions(secret, std::filesystem::perms::owner_read);
  auto stranger = start_script(with(meeting(endpoint(), 2, 1),
                                    {"--rdzv-secret-file=" + secret.string()}),
                               "echo never");
  const auto refused = stranger->finish();
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(refused.out, "");
  EXPECT_THAT(lines(refused.err).back(),
              AllOf(HasSubstr("another secret"), HasSubstr(endpoint()),
                    HasSubstr("LOCKSTEP_JOB_SECRET")));
  EXPECT_EQ(refused.err.find("the secret of"), std::string::npos);
  auto second = start_script(meeting(endpoint(), 2, 1), "echo ran");
  for (auto* one : {first.get(), second.get()}) {
    const auto result = one->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "ran\n");
  }
}

TEST_F(Nodes, WithoutASecretEachNodeIsWarned) {
  const auto node = [&](int rank) {
    return start_script(with(meeting(endpoint(), 2, rank), {"--rdzv-insecure"}),
                        "true", {.environment = {"LOCKSTEP_JOB_SECRET="}});
  };
  auto second = node(1);
  auto first = node(0);
  for (auto* one : {first.get(), second.get()}) {
    const auto result = one->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.err, "without authentication and encryption"), 1)
        << result.err;
  }
}

// A PyTorchJob of Kubernetes sets these: MASTER_ADDR is "localhost" on the
// master, and the master's name on the workers.
TEST_F(Nodes, NodesMeetThoughNodeZeroIsToldLocalhost) {
  // These addresses reach this host, but not a socket that is bound to
  // "localhost" only. Fault 32: nodes of both address families meet.
  using Case = std::pair<std::string, std::string>;
  for (const auto& [backend, other] :
       {Case("lockstep", "127.0.0.2"), Case("lockstep", "::1"),
        Case("static", "127.0.0.2"), Case("static", "::1")}) {
    SCOPED_TRACE(backend + " " + other);
    const std::string port = std::to_string(free_port());
    const auto node = [&](int rank, const std::string& address) {
      return start_script(
          {}, "echo $RANK $MASTER_ADDR",
          {.environment = {
               "PET_NNODES=2", "PET_NODE_RANK=" + std::to_string(rank),
               "PET_MASTER_ADDR=" + address, "PET_MASTER_PORT=" + port,
               "PET_RDZV_BACKEND=" + backend}});
    };
    auto second = node(1, other);
    auto first = node(0, "localhost");
    const auto result = first->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "0 localhost\n");
    EXPECT_EQ(count(result.err, "without authentication"),
              backend == "static" ? 1 : 0)
        << result.err;
    EXPECT_EQ(second->finish().out, "1 " + other + "\n");
  }
}

// Fault 32. A bug: with ip_nonlocal_bind every address can be bound, so that
// each node took the endpoint's for its own, hosted a store and waited.
TEST_F(Nodes, AddressOfAnotherHostIsNotHostedThoughItCanBeBound) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root makes network namespaces";
  const auto result = run_program(
      {"/bin/sh", "-c",
       "exec unshare --net sh -c 'ip link set lo up; "
       "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind; " LOCKSTEP_BIN_DIR
       "/lockstep run --nnodes=2 --rdzv-conf=timeout=2,join_timeout=2 "
       "--rdzv-endpoint=192.0.2.1:29400 true'"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("no agents' store was reached"));
}

// A bug: the name of the endpoint was looked up at each restart, and a name
// server that did not answer then ended the job.
TEST_F(Nodes, RestartNeedsNoNameServer) {
  const std::string in_namespace =
      "unshare --user --map-root-user --mount --net ";
  if (run_program({"/bin/sh", "-c", in_namespace + "true"}).exit_code != 0) {
    GTEST_SKIP() << "this process may make no namespaces";
  }
  const std::string names = (scratch() / "hosts").string();
  const std::string go = (scratch() / "go").string();
  std::ofstream(names) << "127.0.0.1 localhost node0\n";
  std::ofstream(scratch() / "worker")
      << "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; echo ready; until [ "
         "-e "
      << go << " ]; do sleep 0.05; done; exit 1";
  auto nodes =
      start_program({"/bin/sh", "-c",
                     "exec " + in_namespace +
                         "sh -c 'ip link set lo up; mount --bind " + names +
                         " /etc/hosts; for rank in 1 0; do $0 run --nnodes=2 "
                         "--max-restarts=1 --rdzv-endpoint=node0:29400 "
                         "--node-rank=$rank sh " +
                         (scratch() / "worker").string() +
                         " & done; wait $!' " + LOCKSTEP_BIN_DIR "/lockstep"});
  nodes->await_output("ready\n", 2, std::chrono::seconds(60));
  std::ofstream(names) << "127.0.0.1 localhost\n";
  std::ofstream(go).put('.');
  const auto result = nodes->finish(std::chrono::seconds(60));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "restart 1 of 1"), 2) << result.err;
}

// A bug: the launcher waited 600 s for a store at a port that another process
// had, "as no process listens there".
TEST_F(Nodes, PortThatAnotherProcessUsesIsSaidSoon) {
  const auto own = resolve(parse_endpoint("endpoint", endpoint(), 0)).front();
  // It does not listen, and did not ask for SO_REUSEADDR.
  const FileDescriptor other(
      ::socket(own.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(other.get(), own.get(), own.length()), 0);
  const auto result = run_script(meeting(endpoint(), 2), "true");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("another process uses the port"));
}

// The same with a server, which accepts connections and knows other words.
TEST_F(Nodes, PortOfAServerIsSaidSoon) {
  const auto own = resolve(parse_endpoint("endpoint", endpoint(), 0)).front();
  const FileDescriptor server = bind_socket(own);
  ASSERT_EQ(::listen(server.get(), 16), 0);
  const std::jthread serving([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      pollfd entry{server.get(), POLLIN, 0};
      if (::poll(&entry, 1, 50) <= 0) continue;
      const FileDescriptor client(::accept(server.get(), nullptr, nullptr));
      constexpr std::string_view kWords = "HTTP/1.1 400 Bad Request\r\n\r\n";
      ::send(client.get(), kWords.data(), kWords.size(), MSG_NOSIGNAL);
    }
  });
  const auto with_secret = meeting(endpoint(), 2);
  const auto without = with(with_secret, {"--rdzv-insecure"});
  for (const auto& options : {with_secret, without}) {
    const auto result = run_script(
        options, "true",
        {.environment = {options == without
                             ? "LOCKSTEP_JOB_SECRET="
                             : "LOCKSTEP_JOB_SECRET=0123456789abcdef"}});
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr("another process uses the port: "),
                                  HasSubstr("give another port")));
  }
}

TEST_F(Nodes, EveryInterfaceIsNoAddressToReach) {
  for (const char* option :
       {"--master-addr=0.0.0.0", "--rdzv-endpoint=0.0.0.0:29400",
        "--rdzv-endpoint=[::]:29400", "--local-addr=0.0.0.0"}) {
    const auto result =
        run_script({"--nnodes=2", "--rdzv-backend=static", option}, "true");
    EXPECT_EQ(result.exit_code, 2) << option;
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    EXPECT_THAT(result.err, HasSubstr("every interface")) << option;
  }
}

// Each node fails before it has joined; without its reason the others would
// wait for ten minutes.
TEST_F(Nodes, NodeThatCannotJoinEndsTheOthersWithItsReason) {
  struct Fault {
    std::vector<std::string> arguments;
    int exit_code;
    std::string reason;
  };
  const std::vector<Fault> faults{
      {{"/no/such/program"}, 127, "/no/such/program"},
      {{"missing.py"}, 127, "missing.py"},
      {{"--log-dir=/proc/nothing", "true"}, 2, "/proc/nothing"},
      {{"--nproc-per-node=two", "true"}, 2, "is \"two\""},
      {{"--max-restarts=x", "true"}, 2, "--max-restarts"},
      {{"--no-such-option", "true"}, 2, "--no-such-option"},
  };
  for (const auto& fault : faults) {
    for (const int faulty : {0, 1}) {
      std::vector<std::unique_ptr<RunningProgram>> nodes;
      const int port = free_port();
      for (int rank = 0; rank < 3; ++rank) {
        nodes.push_back(start(with(
            fixed(port, 3, rank),
            rank == faulty ? fault.arguments
                           : std::vector<std::string>{"sh", "-c", "true"})));
      }
      for (int rank = 0; rank < 3; ++rank) {
        const auto result = nodes[static_cast<size_t>(rank)]->finish();
        EXPECT_EQ(result.exit_code, fault.exit_code) << result.err;
        EXPECT_EQ(count(result.err, fault.reason), 1) << rank << result.err;
        if (rank != faulty) {
          EXPECT_THAT(result.err,
                      HasSubstr("node " + std::to_string(faulty) + " ("));
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
