#pragma once

// Memory of simulated devices, and pinned memory of the host.
//
// Each device has one range of addresses that nobody may read or write; these
// are the addresses that tensors have. A second range of the same length has
// the contents. Only tasks of streams use it, by host_address().

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace lockstep::internal::simulated_cuda {

// The allocator of all devices. It allocates on the current stream of the
// current device (device_interface.h).
c10::DeviceAllocator& device_allocator();

// Returns where the contents of device memory are. Throws c10::Error if
// `address` is not an address of a device.
void* host_address(const void* address);
// Returns the device that the address belongs to.
std::optional<c10::DeviceIndex> device_of(const void* address);

struct LiveMemory {
  int64_t blocks = 0;
  int64_t bytes = 0;
};
LiveMemory live_memory();

c10::Allocator& pinned_allocator();
// Returns an owner of the pinned block that `address` lies in, or null if this
// memory is pageable. As long as there is an owner, the memory stays what it
// is.
std::shared_ptr<void> pinned_block_of(const void* address);

}  // namespace lockstep::internal::simulated_cuda
