#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/parallel/nn/group_statistics.h"

namespace lockstep::nn {

// Returns (input - mean) * invstd * weight + bias, with autograd; weight and
// bias may be undefined. `input` [N, C, ...] is contiguous in its memory
// format, and so is the result.
//
// If `input` requires grad, which must be so on all ranks or on none, backward
// is collective (one all_reduce), because the statistics depend on every rank's
// input.
at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight,
                     const at::Tensor& bias, const GroupStatistics& statistics);

}  // namespace lockstep::nn
