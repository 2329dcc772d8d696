#include <ATen/detail/CUDAHooksInterface.h>

#include "tests/simulated_cuda/hooks.h"

namespace at {
namespace {

namespace simulated = lockstep::internal::simulated_cuda;

// LibTorch looks the hooks up by this name.
struct CUDAHooks final : simulated::SimulatedHooks<CUDAHooksInterface> {
  explicit CUDAHooks(CUDAHooksArgs /*unused*/) {}
  bool hasCUDA() const override { return simulated::device_count() > 0; }
  int getNumGPUs() const override { return simulated::device_count(); }
  Allocator* getCUDADeviceAllocator() const override {
    return &simulated::device_allocator();
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace
}  // namespace at
