#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>

namespace lockstep::internal {

// Returns a copy of these rows, by one gather: [B, ...] of [N, ...]. Throws
// c10::IndexError if one of `indices` is not in [0, N).
at::Tensor select_rows(const at::Tensor& tensor, c10::ArrayRef<size_t> indices);

}  // namespace lockstep::internal
