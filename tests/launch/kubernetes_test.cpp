// The environments with which Kubeflow starts a container's `lockstep run`: the
// training operator 1.9 for a PyTorchJob (pkg/controller.v1/pytorch: envvar.go,
// master.go, elastic.go), Trainer 2 for a TrainJob (plugins/torch/torch.go).
#include <gmock/gmock.h>

#include <fstream>
#include <functional>
#include <set>

#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

using Environment = std::vector<std::string>;

class Kubernetes : public NodesTest {
 protected:
  // Starts `lockstep run` without options in two pods of two workers, and
  // expects that the four workers know of each other.
  void expect_one_job(const std::function<Environment(int)>& pod) {
    const auto start = [&](int number) {
      return start_script({},
                          "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of "
                          "$LOCAL_WORLD_SIZE, $GROUP_RANK of $GROUP_WORLD_SIZE;"
                          "echo at $MASTER_ADDR:$MASTER_PORT",
                          {.environment = pod(number)});
    };
    auto second = start(1);
    auto first = start(0);
    std::multiset<std::string> said;
    for (auto* each : {&first, &second}) {
      const auto result = (*each)->finish();
      EXPECT_EQ(result.exit_code, 0) << result.err;
      for (const auto& line : lines(result.out)) said.insert(line);
    }
    ASSERT_EQ(said.size(), 8u);
    EXPECT_EQ(said.count("0 of 4, 0 of 2, 0 of 2"), 1u);
    EXPECT_EQ(said.count("1 of 4, 1 of 2, 0 of 2"), 1u);
    EXPECT_EQ(said.count("2 of 4, 0 of 2, 1 of 2"), 1u);
    EXPECT_EQ(said.count("3 of 4, 1 of 2, 1 of 2"), 1u);
    const std::string store = *said.lower_bound("at ");
    EXPECT_EQ(said.count(store), 4u) << "all meet at one store: " << store;
    EXPECT_EQ(said.count("at " + address()), 0u)
        << "the pods' port is the agents', rank 0 has another";
  }

  std::string address() const { return "127.0.0.1:" + std::to_string(port()); }
};

// The operator counts RANK and WORLD_SIZE itself, for containers without a
// launcher.
TEST_F(Kubernetes, PyTorchJobWithAMaster) {
  expect_one_job([&](int pod) {
    const std::string number = std::to_string(pod);
    const std::string port_text = std::to_string(port());
    return Environment{"PYTHONUNBUFFERED=1",
                       "MASTER_PORT=" + port_text,
                       "PET_MASTER_PORT=" + port_text,
                       "MASTER_ADDR=127.0.0.1",
                       "PET_MASTER_ADDR=127.0.0.1",
                       "WORLD_SIZE=4",
                       "RANK=" + number,
                       "PET_NODE_RANK=" + number,
                       "PET_NPROC_PER_NODE=2",
                       "PET_NNODES=2"};
  });
}

// `elasticPolicy` without minReplicas and maxReplicas.
TEST_F(Kubernetes, PyTorchJobOfWorkersWithAnElasticPolicy) {
  expect_one_job([&](int) {
    return Environment{
        "PYTHONUNBUFFERED=1",    "PET_RDZV_ENDPOINT=" + address(),
        "PET_RDZV_BACKEND=c10d", "PET_NNODES=2:2",
        "PET_MAX_RESTARTS=3",    "PET_NPROC_PER_NODE=2",
        "PET_RDZV_ID=job",       "PET_RDZV_CONF=join_timeout=60"};
  });
}

// With minReplicas 1 and maxReplicas 2.
TEST_F(Kubernetes, PyTorchJobOfOneToTwoWorkers) {
  expect_one_job([&](int) {
    return Environment{
        "PYTHONUNBUFFERED=1",    "PET_RDZV_ENDPOINT=" + address(),
        "PET_RDZV_BACKEND=c10d", "PET_NNODES=1:2",
        "PET_MAX_RESTARTS=3",    "PET_NPROC_PER_NODE=2",
        "PET_RDZV_ID=job",       "PET_RDZV_CONF=join_timeout=60"};
  });
}

TEST_F(Kubernetes, TrainJob) {
  expect_one_job([&](int pod) {
    return Environment{"PET_NNODES=2", "PET_NPROC_PER_NODE=2",
                       "PET_NODE_RANK=" + std::to_string(pod),
                       "PET_MASTER_ADDR=127.0.0.1",
                       "PET_MASTER_PORT=" + std::to_string(port())};
  });
}

// nprocPerNode is "auto" if a PyTorchJob does not name it. There is no other
// node whose agent could need the port, so it is that of rank 0's store.
TEST_F(Kubernetes, PyTorchJobOfOneReplica) {
  const std::string port_text = std::to_string(port());
  const auto result = run_script(
      {"--local-ranks-filter=0"}, "echo $RANK at $MASTER_ADDR:$MASTER_PORT",
      {.environment = {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port_text,
                       "PET_MASTER_ADDR=127.0.0.1",
                       "PET_MASTER_PORT=" + port_text, "WORLD_SIZE=1", "RANK=0",
                       "PET_NODE_RANK=0", "PET_NPROC_PER_NODE=auto",
                       "PET_NNODES=1"}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "0 at " + address() + "\n");
}

// Fault 32: the name of a new pod is known some seconds after its start.
TEST_F(Kubernetes, TrainJobOfOneNodeWaitsForItsName) {
  const std::string in_namespace =
      "unshare --user --map-root-user --mount --net ";
  if (run_program({"/bin/sh", "-c", in_namespace + "true"}).exit_code != 0) {
    GTEST_SKIP() << "this process may make no namespaces";
  }
  const auto names = scratch() / "hosts";
  std::ofstream(names) << "127.0.0.1 localhost\n";
  auto pod = start_program(
      {"/bin/sh", "-c",
       "exec " + in_namespace + "sh -c 'ip link set lo up; mount --bind " +
           names.string() +
           " /etc/hosts; exec $0 run sh -c \"echo "
           "\\$MASTER_ADDR\"' " LOCKSTEP_BIN_DIR "/lockstep"},
      {.environment = {"PET_NNODES=1", "PET_NPROC_PER_NODE=1",
                       "PET_NODE_RANK=0", "PET_MASTER_PORT=29500",
                       "PET_MASTER_ADDR=train-node-0-0.train"}});
  pod->await_error("waiting until the address of this job's one node is known",
                   std::chrono::seconds(60));
  std::ofstream(names, std::ios::app) << "127.0.0.1 train-node-0-0.train\n";
  const auto result = pod->finish(std::chrono::seconds(60));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "train-node-0-0.train\n");
}

}  // namespace
}  // namespace lockstep::internal::testing
