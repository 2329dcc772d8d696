#include "lockstep/comm/shm/shared_tensors.h"

#include <iterator>

namespace lockstep::internal::shm {

void SharedTensors::add(const void* data, size_t bytes) {
  std::lock_guard lock(mutex_);
  sizes_[static_cast<const std::byte*>(data)] = bytes;
}

void SharedTensors::remove(const void* data) {
  std::lock_guard lock(mutex_);
  sizes_.erase(static_cast<const std::byte*>(data));
}

bool SharedTensors::hold(const void* data, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  std::lock_guard lock(mutex_);
  auto behind = sizes_.upper_bound(begin);
  if (behind == sizes_.begin()) return false;
  const auto& [start, size] = *std::prev(behind);
  return begin + bytes <= start + size;
}

}  // namespace lockstep::internal::shm
