#pragma once

// The hooks by which LibTorch asks for the current device, pinned memory and
// generators. `Interface` is LibTorch's class for the type of the simulated
// devices; cuda_hooks.cpp and xpu_hooks.cpp register one each.

#include <ATen/core/Generator.h>
#include <c10/util/Exception.h>

#include "tests/simulated_cuda/device_interface.h"
#include "tests/simulated_cuda/device_memory.h"
#include "tests/simulated_cuda/generator.h"
#include "tests/simulated_cuda/scheduler.h"
#include "tests/simulated_cuda/settings.h"

namespace lockstep::internal::simulated_cuda {

template <typename Interface>
struct SimulatedHooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device >= 0 && device < device_count();
  }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex current_device() const override {
    return simulated_cuda::current_device();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return simulated_cuda::current_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = simulated_cuda::current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    const auto device = device_of(address);
    TORCH_CHECK(device,
                "The specified pointer resides on host memory and is "
                "not registered with any ",
                kDeviceType, " device.");
    return {kDeviceType, *device};
  }
  bool isPinnedPtr(const void* address) const override {
    return pinned_block_of(address) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  const at::Generator& getDefaultGenerator(
      c10::DeviceIndex device) const override {
    return default_generator(number_of(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(number_of(device));
  }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    Scheduler::get().wait_for_device(checked_index(device));
  }

 private:
  static c10::DeviceIndex number_of(c10::DeviceIndex device) {
    return device < 0 ? simulated_cuda::current_device()
                      : checked_index(device);
  }
};

}  // namespace lockstep::internal::simulated_cuda
