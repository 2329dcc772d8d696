#pragma once

// Settings of the simulated devices, from the environment (simulated_cuda.h).

#include <c10/core/Device.h>

#include <cstdint>

namespace lockstep::internal::simulated_cuda {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::CUDA;
constexpr int kMostDevices = 16;

// The number of visible devices.
c10::DeviceIndex device_count() noexcept;
// Throws c10::Error if there is no such device; returns its index.
c10::DeviceIndex checked_index(c10::DeviceIndex device);
uint64_t initial_seed();

}  // namespace lockstep::internal::simulated_cuda
