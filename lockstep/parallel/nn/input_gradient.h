#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// Returns the gradient of a batch norm by its input, on a CPU, in one pass:
//
//   (grad_output - shift - (input - mean) * slope) * scale
//
// `grad_output` and `input` are [N, C, ...], of one dtype and contiguous in the
// same memory format, which the result has, too. The others are [C], of the
// statistics' dtype, in which this computes.
at::Tensor input_gradient(const at::Tensor& grad_output,
                          const at::Tensor& input, const at::Tensor& mean,
                          const at::Tensor& shift, const at::Tensor& slope,
                          const at::Tensor& scale);

}  // namespace lockstep::nn
