#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>

namespace lockstep::internal {

// Returns a new tensor [B, ...] of the rows of `rows` [N, ...] with the given
// indices: bit by bit what rows.index_select(0, indices) returns, in the same
// dtype and on the same device. Throws c10::IndexError for an index that is not
// in [0, N).
//
// The rows of an ordinary tensor on the CPU are copied without the dispatcher
// and its iterators, which take four times as long as the copy of a small
// batch; rows that follow each other are copied at once. Other tensors
// (on another device, strided, that require a gradient, ...) are left to
// index_select, and so are large batches if LibTorch may use several threads.
at::Tensor gather_rows(const at::Tensor& rows, c10::ArrayRef<size_t> indices);

}  // namespace lockstep::internal

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
