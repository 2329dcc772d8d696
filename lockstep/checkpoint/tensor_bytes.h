#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace lockstep::internal {

// Throws std::invalid_argument for a tensor that no snapshot can hold.
inline void require_dense(const std::string& name, const at::Tensor& tensor) {
  if (tensor.layout() == at::kStrided) return;
  throw std::invalid_argument(
      "the tensor \"" + name +
      "\" is not dense, and a snapshot holds only dense "
      "tensors; make it dense, or keep it out of the "
      "module");
}

// Returns `tensor` as a file holds it: detached, on the CPU, contiguous, its
// bytes in the machine's order (little-endian). Copies only if the tensor is
// not like that already.
inline at::Tensor file_form(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
}

// Returns whether `size` bytes are valid values of `dtype`: all bytes are,
// except that a bool must be 0 or 1 (anything else is undefined behaviour in
// C++).
inline bool valid_values(const void* data, size_t size, c10::ScalarType dtype) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  return dtype != c10::ScalarType::Bool ||
         std::all_of(bytes, bytes + size,
                     [](unsigned char byte) { return byte <= 1; });
}

}  // namespace lockstep::internal
