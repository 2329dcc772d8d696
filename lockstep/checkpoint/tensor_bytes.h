#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace lockstep::internal {

// Throws std::invalid_argument for a tensor that no snapshot can hold.
inline void require_dense(const std::string& name, const at::Tensor& tensor) {
  if (tensor.defined() && tensor.layout() == at::kStrided) return;
  throw std::invalid_argument(
      "the tensor \"" + name +
      (tensor.defined() ? "\" is not dense, and a snapshot holds only dense "
                          "tensors; make it dense, or keep it out of the module"
                        : "\" is undefined; give it values, or leave it out"));
}

// Throws std::invalid_argument for such a tensor, and for one without values.
inline void require_values(const std::string& name, const at::Tensor& tensor) {
  require_dense(name, tensor);
  if (!tensor.is_meta()) return;
  throw std::invalid_argument("the tensor \"" + name +
                              "\" is on the device \"meta\" and has no "
                              "values; give it some before you save it");
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

// Identifies the elements of which a tensor is a view: two tensors with equal
// ones have the same elements, in the same order. (A row and the whole matrix
// begin at the same address, and are not equal. Conjugates and negatives are
// views of the same memory, but have other values.)
using TensorMemory =
    std::tuple<const void*, c10::ScalarType, std::vector<int64_t>,
               std::vector<int64_t>, bool, bool>;

inline TensorMemory memory_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type(), tensor.sizes().vec(),
          tensor.strides().vec(),  tensor.is_conj(),     tensor.is_neg()};
}

// Whether it has elements in memory, so that equal memory_of() means one
// tensor.
inline bool may_be_tied(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_meta() &&
         tensor.numel() > 0;
}

// file_form() of several tensors; those that are one (tied weights) have one
// form, which a file then has once.
class FileForms {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!may_be_tied(tensor)) return file_form(tensor);
    at::Tensor& form = forms_[memory_of(tensor)];
    if (!form.defined()) form = file_form(tensor);
    return form;
  }

 private:
  std::map<TensorMemory, at::Tensor> forms_;
};

}  // namespace lockstep::internal
