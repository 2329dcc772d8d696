// Results of "lockstep" over several hosts that Gloo alone would not give.
// LOCKSTEP_HOST_ID makes the hosts differ.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

// Puts ranks 0 and 1 on one host, 2 and 3 on the next, and so on.
ProcessGroupGuard init(int rank) {
  ::setenv("LOCKSTEP_HOST_ID", std::to_string(rank / 2).c_str(), 1);
  return init_process_group("cpu:lockstep",
                            {.timeout = std::chrono::seconds(30)});
}

WORLD_TEST(HybridNumbers, NaNWinsInMinAndMaxWhoeverHasIt, 3, 4, 5) {
  auto group = init(world.rank);
  for (const int owner : {0, 1, world.size - 1}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
        auto tensor = at::full({100}, world.rank, dtype);
        if (world.rank == owner) {
          tensor[3] = std::numeric_limits<double>::quiet_NaN();
        }
        all_reduce(tensor, {.op = op});
        const double other = op == ReduceOp::MIN ? 0 : world.size - 1;
        EXPECT_TRUE(tensor[3].isnan().item<bool>());
        EXPECT_EQ(tensor[4].item<double>(), other);
      }
    }
  }
}

WORLD_TEST(HybridNumbers, AnAverageOfHalvesNeedsNoLargerNumbers, 3, 4, 5) {
  auto group = init(world.rank);
  auto tensor = at::full({100}, 40000, at::kHalf);
  all_reduce(tensor, {.op = ReduceOp::AVG});
  EXPECT_LE((tensor.to(at::kFloat) - 40000).abs().max().item<float>(), 32);
}

}  // namespace
}  // namespace lockstep::internal
