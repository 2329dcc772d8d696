#pragma once

// Settings of the simulated devices: their type, which the build chooses, and
// others from the environment (simulated_cuda.h).

#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>

namespace lockstep::internal::simulated_cuda {

// SIMULATED_DEVICE_TYPE is LibTorch's name of the type, CUDA or XPU.
constexpr c10::DeviceType kDeviceType = c10::DeviceType::SIMULATED_DEVICE_TYPE;
constexpr c10::DispatchKeySet kDeviceKey(
    c10::DispatchKey::SIMULATED_DEVICE_TYPE);
constexpr int kMostDevices = 16;

// The number of visible devices.
c10::DeviceIndex device_count() noexcept;
// Throws c10::Error if there is no such device; returns its index.
c10::DeviceIndex checked_index(c10::DeviceIndex device);
uint64_t initial_seed();

}  // namespace lockstep::internal::simulated_cuda
