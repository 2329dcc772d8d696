// Python ranks and ours in one Gloo group, by the same keys in the store.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/harness/running_program.h"

namespace lockstep {
namespace {

using testing::World;

// This rank's part is taken by a Python process with its environment.
void be_python(const World& world) {
  // `timeout`, so that nothing stays even if this rank is killed.
  testing::ProgramSetup setup{
      .environment = {"TMPDIR=" + world.folder.string()}};
  for (const char* name :
       {"PATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}) {
    setup.environment.push_back(std::string(name) + "=" + std::getenv(name));
  }
  testing::RunningProgram python(
      {"/usr/bin/timeout", "--kill-after=5", "45", LOCKSTEP_TORCH_PYTHON,
       LOCKSTEP_SOURCE_DIR "/tests/comm/python_rank.py"},
      setup);
  auto result = python.finish(std::chrono::seconds(52));
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

void be_ours(const World& world) {
  auto group =
      init_process_group("cpu:gloo", {.timeout = std::chrono::seconds(40)});
  int rank = world.rank;
  int size = world.size;

  auto total = torch::arange(5, torch::kDouble) + rank;
  all_reduce(total);
  EXPECT_TRUE(total.equal(size * torch::arange(5, torch::kDouble) +
                          size * (size - 1) / 2.0))
      << total;

  for (int source = 0; source < size; ++source) {
    auto value = torch::full({3}, rank, torch::kLong);
    broadcast(value, source);
    EXPECT_TRUE(value.equal(torch::full({3}, source, torch::kLong))) << value;
  }

  std::vector<torch::Tensor> parts;
  for (int i = 0; i < size; ++i) parts.push_back(torch::empty({2}));
  all_gather(parts, torch::full({2}, static_cast<float>(rank)));
  for (int source = 0; source < size; ++source) {
    EXPECT_TRUE(parts[source].eq(source).all().item<bool>()) << parts[source];
  }

  barrier();
}

void stand_together(const World& world, int python_rank) {
  if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
  }
  if (world.rank == python_rank) {
    be_python(world);
  } else {
    be_ours(world);
  }
}

WORLD_TEST(PythonRank, JoinsAGroupThatOursHosts, 2, 3) {
  stand_together(world, world.size - 1);
}

WORLD_TEST(PythonRank, HostsAGroupThatOursJoin, 2, 3) {
  stand_together(world, 0);
}

}  // namespace
}  // namespace lockstep
