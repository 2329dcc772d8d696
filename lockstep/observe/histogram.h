#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/observe/event.h"

namespace lockstep::internal {

// Returns TensorBoard's default edges, 1549 numbers: 0, and in both directions
// 1e-12 * 1.1^k below 1e20.
const std::vector<double>& default_bin_edges();

// Counts `values` (any shape, real, not empty, on any device) in float64, as
// Python's torch.utils.tensorboard does: a bin holds its left edge and not its
// right one, except the last bin, which holds both; values outside of the edges
// and NaN are in no bin; empty bins at both ends are left out, except one on
// the left. `edges`: 2 or more, ascending. If no value is in any bin, where
// Python throws, the result is one empty bin.
HistogramData count_histogram(const at::Tensor& values,
                              const std::vector<double>& edges);

}  // namespace lockstep::internal
