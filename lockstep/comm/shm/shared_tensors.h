#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace lockstep::shm {

// Where tensors in memory that ranks share lie. Threads: any.
class SharedTensors {
 public:
  void add(const void* data, size_t bytes);
  void remove(const void* data);
  // Whether [data, data + bytes) lies in one of them.
  bool hold(const void* data, size_t bytes);

 private:
  std::mutex mutex_;
  std::map<const std::byte*, size_t> sizes_{};
};

}  // namespace lockstep::shm
