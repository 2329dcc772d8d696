#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>

namespace lockstep {

// A dataset in memory: sample i is row i of `data` with row i of `target`. It
// follows torch.utils.data.TensorDataset, but makes a batch by one gather from
// each tensor instead of stacking single rows.
//
// A batch is a copy with shape [B, ...] of tensors with shape [N, ...], in
// their dtypes and on their device; changing the batch does not change the
// dataset. Several threads may call get_batch() at once.
class TensorDataset {
 public:
  // Keeps references to the tensors, not copies. Throws std::invalid_argument
  // if one is undefined or a scalar, or if they differ in their number of rows.
  TensorDataset(at::Tensor data, at::Tensor target);

  // Requires `indices` in [0, size()); throws c10::IndexError otherwise.
  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) const;

  // Returns a copy of one sample, without the dimension of the batch. Throws as
  // get_batch() does.
  torch::data::Example<> get(size_t index) const;

  size_t size() const { return static_cast<size_t>(data_.size(0)); }

  const at::Tensor& data() const { return data_; }
  const at::Tensor& target() const { return target_; }

 private:
  at::Tensor data_;
  at::Tensor target_;
};

}  // namespace lockstep
