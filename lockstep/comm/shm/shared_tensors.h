#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace lockstep::internal::shm {

// Knows where the tensors lie that are in memory shared by the ranks. Threads:
// any.
class SharedTensors {
 public:
  void add(const void* data, size_t bytes);
  void remove(const void* data);
  // Returns whether [data, data + bytes) lies in one of them.
  bool hold(const void* data, size_t bytes);

 private:
  std::mutex mutex_;
  std::map<const std::byte*, size_t> sizes_{};
};

}  // namespace lockstep::internal::shm
