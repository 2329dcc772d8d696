// Compares random modules, options and schedules on the simulated device with
// LibTorch alone on the CPU.

#include "tests/parallel/fuzz/expect_cases.h"
#include "tests/simulated_cuda/simulated_ddp_cases.h"

namespace lockstep::internal::fuzz {
namespace {

WORLD_TEST(DdpFuzz, TrainsAsOneProcessOnDevices, 2, 3) {
  expect_cases_pass(kSimulatedDdpCases, "simgpu_ddp_fuzz", "nccl", 0, 30);
}

}  // namespace
}  // namespace lockstep::internal::fuzz
