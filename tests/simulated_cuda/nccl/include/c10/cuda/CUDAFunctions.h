#pragma once

// Replaces LibTorch's header of this name, which needs CUDA, for the sources
// that are compiled for the simulated devices.

#include <c10/core/impl/VirtualGuardImpl.h>

namespace c10::cuda {

inline void set_device(c10::DeviceIndex device) {
  impl::VirtualGuardImpl(kCUDA).setDevice({kCUDA, device});
}

}  // namespace c10::cuda
