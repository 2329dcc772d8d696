#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/parallel/nn/group_statistics.h"

namespace lockstep::nn {

// (input - mean) * invstd * weight + bias, with autograd; weight and bias may
// be undefined. `input` [N, C, ...] is contiguous in its memory format, as is
// the result.
//
// Its backward is collective, one all_reduce, if `input` requires grad: the
// statistics depend on every rank's input. It must be so on all ranks.
at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight,
                     const at::Tensor& bias, const GroupStatistics& statistics);

}  // namespace lockstep::nn
