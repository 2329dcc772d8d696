#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// Of `input` [N, C, ...] on a CPU, floating point, contiguous in its memory
// format: [mean of each channel, variance of each, number of values of one],
// float64, 2 C + 1 in all; zeros where there is no value. The variance is
// divided by that number.
//
// One pass over the input, in float64, of the differences from each channel's
// first value, so that a mean far from zero costs no digits (Chan, Golub,
// LeVeque, "Algorithms for Computing the Sample Variance", The American
// Statistician 37, 1983, shifted data). The result does not depend on the
// number of threads.
at::Tensor channel_moments(const at::Tensor& input);

}  // namespace lockstep::nn
