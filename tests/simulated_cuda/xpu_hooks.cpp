#include <ATen/detail/XPUHooksInterface.h>

#include "tests/simulated_cuda/hooks.h"

namespace at {
namespace {

namespace simulated = lockstep::internal::simulated_cuda;

// LibTorch looks the hooks up by this name.
struct XPUHooks final : simulated::SimulatedHooks<XPUHooksInterface> {
  bool hasXPU() const override { return simulated::device_count() > 0; }
  DeviceIndex getNumGPUs() const override { return simulated::device_count(); }
};

REGISTER_XPU_HOOKS(XPUHooks)

}  // namespace
}  // namespace at
