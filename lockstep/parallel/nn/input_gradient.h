#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// A batch norm's gradient by its input, on a CPU, in one pass:
//
//   (grad_output - shift - (input - mean) * slope) * scale
//
// `grad_output` and `input` [N, C, ...] of one dtype, contiguous in the same
// memory format, as the result is; the others [C], of the statistics' dtype,
// in which it is computed.
at::Tensor input_gradient(const at::Tensor& grad_output,
                          const at::Tensor& input, const at::Tensor& mean,
                          const at::Tensor& shift, const at::Tensor& slope,
                          const at::Tensor& scale);

}  // namespace lockstep::nn
