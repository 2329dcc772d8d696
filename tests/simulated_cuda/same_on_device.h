#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal::testing {

// The group of these tests: shared memory for CPU tensors, NCCL's stand-in for
// those of the rank's device.
inline ProcessGroupGuard group_of_both() {
  return init_process_group("cpu:lockstep,cuda:nccl",
                            {.timeout = std::chrono::seconds(30)});
}

// How many draws of delays a case runs with. LOCKSTEP_SIMGPU_SEEDS asks for
// more.
inline uint64_t seeds() {
  const char* const text = std::getenv("LOCKSTEP_SIMGPU_SEEDS");
  return text != nullptr ? std::stoull(text) : 2;
}

// Begins the delays of `seed`, others on each rank.
inline void restart(const World& world, uint64_t seed) {
  simulated_cuda::restart(seed * static_cast<uint64_t>(world.size) +
                          static_cast<uint64_t>(world.rank));
}

// A training run on a device; returns what it computed there.
using Run = std::function<std::vector<torch::Tensor>(torch::Device device)>;

// Expects that the run gives the numbers of the CPU on this rank's device, with
// any delays. `tolerance`: 0 means bit by bit.
inline void expect_same_on_device(const World& world, const Run& run,
                                  double tolerance = 0) {
  torch::manual_seed(world.rank);
  const std::vector<torch::Tensor> expected = run(torch::kCPU);
  const torch::Device device = local_device();
  ASSERT_TRUE(device.is_cuda());
  for (uint64_t seed = 1; seed <= seeds(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    restart(world, seed);
    torch::manual_seed(world.rank);
    const std::vector<torch::Tensor> results = run(device);
    ASSERT_EQ(results.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(results[i].defined(), expected[i].defined()) << "result " << i;
      if (!results[i].defined()) continue;
      ASSERT_EQ(results[i].scalar_type(), expected[i].scalar_type());
      const torch::Tensor got = results[i].cpu();
      EXPECT_TRUE(tolerance == 0
                      ? got.equal(expected[i])
                      : got.allclose(expected[i], tolerance, tolerance))
          << "result " << i << " is off by "
          << (got - expected[i].to(torch::kDouble)).abs().max();
    }
  }
}

// The tolerance of sums over the ranks: NCCL's are divided before they are
// added, those of shared memory afterwards, which is the same for two ranks.
inline double tolerance_of(const World& world, double otherwise = 1e-5) {
  return world.size == 2 ? 0 : otherwise;
}

// Adds copies of parameters, gradients and buffers to `results`.
inline void append_state(const torch::nn::Module& module,
                         std::vector<torch::Tensor>& results) {
  for (const torch::Tensor& parameter : module.parameters()) {
    results.push_back(parameter.detach().clone());
    const torch::Tensor& grad = parameter.grad();
    results.push_back(!grad.defined()    ? grad
                      : grad.is_sparse() ? grad.to_dense()
                                         : grad.clone());
  }
  for (const torch::Tensor& buffer : module.buffers()) {
    results.push_back(buffer.clone());
  }
}

}  // namespace lockstep::internal::testing
