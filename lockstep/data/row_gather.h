#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

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
