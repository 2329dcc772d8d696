#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep::internal {

// Returns how often LibTorch has counted a write to the tensor; 0 for an
// inference tensor, whose writes it does not count.
inline int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

}  // namespace lockstep::internal
