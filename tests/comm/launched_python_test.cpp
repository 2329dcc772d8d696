// C++ and Python ranks that `lockstep run` starts into one group, without an
// option that says so.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;

// Does what the scenario "sum" of launched_rank.cpp does.
const char* const kSum = R"(
import os
import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo")
for group in [dist.GroupMember.WORLD, None]:
    total = torch.full((1,), dist.get_rank(), dtype=torch.int64)
    dist.all_reduce(total, group=group or dist.new_group())
    print("sum", dist.get_rank(), "is", total.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
)";

class LaunchedPython : public NodesTest {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
      GTEST_SKIP() << "no Python at " << LOCKSTEP_TORCH_PYTHON;
    }
    script_ = scratch() / "sum.py";
    std::ofstream(script_) << kSum;
    set_for_all("PYTHON_EXEC=" LOCKSTEP_TORCH_PYTHON);
  }

  const std::string ours_ =
      LOCKSTEP_BIN_DIR "/tests/comm_launched_rank sum cpu:gloo";
  std::filesystem::path script_{};
};

TEST_F(LaunchedPython, RanksOfBothLanguagesMeetUnderOneLauncher) {
  const std::string theirs = LOCKSTEP_TORCH_PYTHON " " + script_.string();
  for (const auto& [first, second] :
       {std::pair(ours_, theirs), std::pair(theirs, ours_)}) {
    SCOPED_TRACE(first);
    const auto result =
        start({"--nproc-per-node=2", "sh", "-c",
               "[ $RANK = 0 ] && exec " + first + "; exec " + second})
            ->finish(seconds(100));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count(result.out, " is 1\n"), 4) << result.out;
  }
}

TEST_F(LaunchedPython, NodesOfBothLanguagesMeet) {
  for (const int ours_first : {0, 1}) {
    SCOPED_TRACE(ours_first);
    const std::string where = "[::1]:" + std::to_string(free_port());
    auto ours = start(with(
        meeting(where, 2, 1 - ours_first),
        {LOCKSTEP_BIN_DIR "/tests/comm_launched_rank", "sum", "cpu:gloo"}));
    auto theirs =
        start(with(meeting(where, 2, ours_first), {script_.string()}));
    for (auto* node : {&ours, &theirs}) {
      const auto result = (*node)->finish(seconds(100));
      EXPECT_EQ(result.exit_code, 0) << result.err;
      EXPECT_EQ(count(result.out, " is 1\n"), 2) << result.out;
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
