#pragma once

#include <cstddef>

namespace lockstep {

// What a c10d::Backend whose allocateTensor() gives memory that other
// processes map also is. Internal to comm.
class TensorSharing {
 public:
  // Whether [data, data + bytes) lies in one such tensor. Any thread.
  virtual bool shares(const void* data, size_t bytes) const = 0;

 protected:
  // Owned as a backend.
  ~TensorSharing() = default;
};

}  // namespace lockstep
