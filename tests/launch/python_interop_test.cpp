// Python's torch under this launcher. The interpreter is LOCKSTEP_PYTHON, or
// else .venv/bin/python of the repository.
#include <gmock/gmock.h>

#include <fstream>

#include "lockstep/base/environment.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;

class PythonInterop : public NodesTest {
 protected:
  void SetUp() override {
    python_ = get_env("LOCKSTEP_PYTHON")
                  .value_or(LOCKSTEP_SOURCE_DIR "/.venv/bin/python");
    if (!fs::exists(python_)) GTEST_SKIP() << "no Python at " << python_;
  }
  std::string python_;
};

const char* const kGroup = R"(
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
print("sum", value.item(), os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.barrier()
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # Gloo's threads outlive the interpreter now and then
)";

// Python's TCPStore binds the port that the launcher holds; after a failure the
// next attempt gets a new store.
TEST_F(PythonInterop, GlooGroupRestartsOnAFreshStore) {
  const fs::path script = scratch() / "group.py";
  std::ofstream(script) << kGroup;
  auto launcher = start({"--nproc-per-node=2", "--max-restarts=1",
                         // Python -u writes a line in pieces.
                         "--prefix-lines", script},
                        {.environment = {"PYTHON_EXEC=" + python_}});
  const auto result = launcher->finish(std::chrono::seconds(100));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.out, "sum 3.0 0\n"), 2) << result.out;
  EXPECT_EQ(count(result.out, "sum 3.0 1\n"), 2) << result.out;
}

TEST_F(PythonInterop, GlooGroupOverTwoNodesRestartsOnAFreshStore) {
  const fs::path script = scratch() / "group.py";
  std::ofstream(script) << kGroup;
  std::vector<std::unique_ptr<RunningProgram>> nodes;
  // Two jobs side by side: Python's workers do not depend on the agents' store.
  for (const char* backend : {"lockstep", "c10d"}) {
    const std::string where = "[::1]:" + std::to_string(free_port());
    for (const int rank : {0, 1}) {
      nodes.push_back(start(
          with(meeting(where, 2, rank, backend), {"--max-restarts=1", script}),
          {.environment = {"PYTHON_EXEC=" + python_}}));
    }
  }
  for (auto& node : nodes) {
    const auto result = node->finish(std::chrono::seconds(100));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "sum 3.0 0\nsum 3.0 1\n");
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
