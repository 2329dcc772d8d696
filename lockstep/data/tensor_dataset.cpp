#include "lockstep/data/tensor_dataset.h"

#include <ATen/Functions.h>

#include <stdexcept>
#include <string>

#include "lockstep/data/held_dataset.h"
#include "lockstep/data/row_gather.h"

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

torch::data::Example<> TensorDataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  return {internal::gather_rows(data_, indices),
          internal::gather_rows(target_, indices)};
}

torch::data::Example<> TensorDataset::get(size_t index) const {
  internal::check_index(index, static_cast<size_t>(data_.size(0)),
                        "TensorDataset");
  const auto row = static_cast<int64_t>(index);
  return {data_.select(0, row).clone(), target_.select(0, row).clone()};
}

}  // namespace lockstep
