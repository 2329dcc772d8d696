#pragma once

// Stands for LibTorch's header of this name, which needs CUDA: the one function
// of it that lockstep/comm/nccl calls, for the simulated device.

#include <ATen/DeviceAccelerator.h>

namespace c10::cuda {

inline void set_device(c10::DeviceIndex device) {
  at::accelerator::setDeviceIndex(device);
}

}  // namespace c10::cuda
