#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"
#include "tests/simulated_cuda/settings.h"
#include "tests/simulated_cuda/simulated_cuda.h"

// Trainings on simulated devices beside the same on the CPU.
namespace lockstep::internal::testing {

using simulated_cuda::kDeviceType;

// The backend for the devices: c10d's NCCL, or one that the program has
// registered (xccl.cpp).
inline const std::string kDeviceBackend =
    kDeviceType == c10::DeviceType::CUDA ? "cuda:nccl" : "xpu:xccl";

// Runs `body` on this rank's device in a new world for each of two draws of
// delays; LOCKSTEP_TEST_DRAW is another first one. Every second world has no
// backend for the CPU, so that its control messages use the devices, too.
inline void with_delays(const std::function<void(const at::Device&)>& body) {
  const char* given = std::getenv("LOCKSTEP_TEST_DRAW");
  const uint64_t first = given != nullptr ? std::stoull(given) : 1;
  for (uint64_t draw = first; draw < first + 2; ++draw) {
    SCOPED_TRACE("draw " + std::to_string(draw));
    simulated_cuda::restart(draw);
    const auto group = init_process_group(draw % 2 == 1 ? kDeviceBackend : "");
    body(local_device());
    if (::testing::Test::HasFailure()) return;
  }
}

// `train` returns the results of a training on a device. They may
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
      EXPECT_EQ(results[i].device().type(), kDeviceType);
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

// Adds copies of the module's parameters, gradients and buffers to `values`.
inline void append_state(const torch::nn::Module& module,
                         std::vector<at::Tensor>& values) {
  for (const at::Tensor& parameter : module.parameters()) {
    values.push_back(parameter.detach().clone());
    if (parameter.grad().defined()) values.push_back(parameter.grad().clone());
  }
  for (const at::Tensor& buffer : module.buffers()) {
    values.push_back(buffer.clone());
  }
}

// The bound of what comes from sums over the ranks: NCCL's are divided before
// they are added, those of shared memory afterwards, which gives the same bits
// for two ranks. `otherwise`: for more ranks.
inline double bound_of_sums(const World& world, double otherwise = 1e-5) {
  return world.size == 2 ? 0 : otherwise;
}

}  // namespace lockstep::internal::testing
