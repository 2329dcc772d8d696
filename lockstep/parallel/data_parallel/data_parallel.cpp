#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <string>

#include "lockstep/comm/accelerator.h"

namespace lockstep::internal {
namespace {

at::Device with_index(const at::Device& device) {
  if (device.is_cpu()) return at::kCPU;
  if (device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

std::vector<at::Device> all_accelerators() {
  std::vector<at::Device> devices;
  const auto type = visible_accelerator();
  // As in Python, which leaves MPS, with its one device, alone.
  if (!type || *type == at::kMPS) return devices;
  for (c10::DeviceIndex index = 0; index < at::accelerator::deviceCount();
       ++index) {
    devices.emplace_back(*type, index);
  }
  return devices;
}

}  // namespace

DataParallelState::DataParallelState(const torch::nn::Module& module,
                                     std::vector<at::Device> devices,
                                     int64_t intra_op_threads)
    : devices_(std::move(devices)) {
  if (devices_.size() < 2) return;
  replicas_ = std::make_unique<Replicas>(module, devices_);
  threads_ = std::make_unique<ReplicaThreads>(devices_, intra_op_threads);
}

std::vector<at::Device> data_parallel_devices(
    const std::vector<at::Device>& device_ids, int64_t intra_op_threads) {
  if (intra_op_threads < 0) {
    throw std::invalid_argument(
        "DataParallelOptions::intra_op_threads is " +
        std::to_string(intra_op_threads) +
        ": give a number of threads, or 0 for a share of the caller's");
  }
  if (device_ids.empty()) return all_accelerators();
  std::vector<at::Device> devices;
  for (const auto& device : device_ids) {
    devices.push_back(with_index(device));
  }
  return devices;
}

}  // namespace lockstep::internal
