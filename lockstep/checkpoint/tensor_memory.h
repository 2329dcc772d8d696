#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "lockstep/checkpoint/tensor_bytes.h"

namespace lockstep::internal {

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
