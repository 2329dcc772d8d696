#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "tests/simulated_cuda/simulated_cuda.h"

// Trainings on simulated GPUs beside the same on the CPU.
namespace lockstep::internal::testing {

// Runs `body` on this rank's GPU in a new world for each of two draws of
// delays; LOCKSTEP_TEST_DRAW is another first one. Every second world has NCCL
// alone, so that its control messages go over NCCL, too.
inline void with_delays(const std::function<void(const at::Device&)>& body) {
  const char* given = std::getenv("LOCKSTEP_TEST_DRAW");
  const uint64_t first = given != nullptr ? std::stoull(given) : 1;
  for (uint64_t draw = first; draw < first + 2; ++draw) {
    SCOPED_TRACE("draw " + std::to_string(draw));
    simulated_cuda::restart(draw);
    const auto group = init_process_group(draw % 2 == 1 ? "nccl" : "");
    body(local_device());
    if (::testing::Test::HasFailure()) return;
  }
}

// `train` returns the results of a training on a device. Those of the GPU may
// differ from those of the CPU by `bound`; with 0 they are the same bits.
using Training = std::function<std::vector<at::Tensor>(const at::Device&)>;
inline void expect_as_on_cpu(const Training& train, double bound) {
  std::vector<at::Tensor> expected;
  {
    const auto group = init_process_group("lockstep");
    expected = train(at::kCPU);
  }
  with_delays([&](const at::Device& device) {
    const auto results = train(device);
    ASSERT_EQ(results.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(results[i].is_cuda());
      EXPECT_TRUE(results[i].cpu().allclose(expected[i], bound, bound))
          << "result " << i << ":\n"
          << results[i].cpu() << "\nand on the CPU:\n"
          << expected[i];
    }
  });
}

// Returns the values of the parameters, and their gradients.
inline std::vector<at::Tensor> values_of(
    const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : parameters) {
    values.push_back(parameter.detach());
    if (parameter.grad().defined()) values.push_back(parameter.grad());
  }
  return values;
}

}  // namespace lockstep::internal::testing
