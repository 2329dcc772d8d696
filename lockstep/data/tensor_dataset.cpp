#include "lockstep/data/tensor_dataset.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include <stdexcept>
#include <string>

namespace lockstep {

TensorDataset::TensorDataset(at::Tensor data, at::Tensor target)
    : data_(std::move(data)), target_(std::move(target)) {
  auto require_rows = [](const at::Tensor& tensor, const char* name) {
    if (!tensor.defined() || tensor.dim() == 0) {
      throw std::invalid_argument(
          std::string("TensorDataset: ") + name +
          (tensor.defined() ? " is a scalar" : " is undefined") +
          "; give a tensor whose first dimension counts the samples");
    }
  };
  require_rows(data_, "data");
  require_rows(target_, "target");
  if (data_.size(0) != target_.size(0)) {
    throw std::invalid_argument(
        "TensorDataset: data has " + std::to_string(data_.size(0)) +
        " rows and target " + std::to_string(target_.size(0)) +
        "; give one target for each sample");
  }
}

torch::data::Example<> TensorDataset::get_batch(c10::ArrayRef<size_t> indices) {
  static_assert(sizeof(size_t) == sizeof(int64_t));
  // The indices are read in place: index_select wants int64, and size_t differs
  // from it only in values that no dataset reaches (they would become negative,
  // and index_select refuses them).
  at::Tensor rows = at::from_blob(const_cast<size_t*>(indices.data()),
                                  {static_cast<int64_t>(indices.size())},
                                  at::TensorOptions(at::kLong));
  // This is a no-op on the CPU. The copy to a GPU from pageable memory is
  // synchronous, so the caller's indices need not outlive this call there
  // either.
  rows = rows.to(data_.device());
  return {data_.index_select(0, rows),
          target_.index_select(0, rows.to(target_.device()))};
}

}  // namespace lockstep
