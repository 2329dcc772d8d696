// Programs that use collectives on a GPU with a mistake: the simulation finds
// them, and is content without the mistake.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal {
namespace {

using testing::World;

constexpr uint64_t kSeeds = 30;

bool is_all(const at::Tensor& tensor, double value) {
  return tensor.cpu().eq(value).all().item<bool>();
}

// Returns with how many seeds the result was wrong. Takes the wait from the
// program if `mistaken`.
template <typename Program>
int wrong_results(const Program& program, bool mistaken) {
  auto group = init_process_group("cuda:nccl");
  int wrong = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    simulated_cuda::restart(seed);
    if (!program(mistaken)) ++wrong;
  }
  simulated_cuda::restart(0);
  return wrong;
}

bool reads_a_sum_too_early(bool mistaken) {
  auto tensor = at::full({1000}, get_rank() + 1.0, local_device());
  const auto work = all_reduce(tensor, {.async_op = true});
  if (!mistaken) work->wait();
  const bool right = is_all(tensor, 3);
  work->wait();
  return right;
}

bool writes_what_is_still_sent(bool mistaken) {
  auto tensor = at::full({1000}, get_rank() + 1.0, local_device());
  const auto sum = at::empty({2000}, tensor.options());
  // Lockstep itself notices writes to a tensor, but not to others that share
  // its memory.
  const auto work =
      all_gather_into_tensor(sum, tensor.view(-1), {.async_op = true});
  if (!mistaken) work->wait();
  tensor.fill_(7);
  work->wait();
  return is_all(sum.slice(0, 0, 1000), 1) && is_all(sum.slice(0, 1000), 2);
}

WORLD_TEST(SimulatedNcclMistakes, ReadsASumTooEarly, 2) {
  EXPECT_GT(wrong_results(reads_a_sum_too_early, true), 0);
  EXPECT_EQ(wrong_results(reads_a_sum_too_early, false), 0);
}

WORLD_TEST(SimulatedNcclMistakes, WritesWhatIsStillSent, 2) {
  EXPECT_GT(wrong_results(writes_what_is_still_sent, true), 0);
  EXPECT_EQ(wrong_results(writes_what_is_still_sent, false), 0);
}

// Found first: c10d's NCCL gives no work for a synchronous operation.
WORLD_TEST(SimulatedNccl, SynchronousCollectivesDoNotWaitOnTheHost, 2) {
  auto group = init_process_group("cuda:nccl");
  auto tensor = at::ones({1000}, local_device());
  const auto waits = simulated_cuda::counters().host_waits;
  all_reduce(tensor);
  tensor.add_(1);
  EXPECT_EQ(simulated_cuda::counters().host_waits, waits);
  EXPECT_TRUE(is_all(tensor, 3));
}

}  // namespace
}  // namespace lockstep::internal
