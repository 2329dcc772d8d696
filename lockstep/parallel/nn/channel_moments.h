#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// Returns the moments of `input` [N, C, ...] as 2 C + 1 float64 numbers: the
// mean of each channel, the variance of each channel, and the number n of
// values in one channel; zeros if there is no value. The variance is divided by
// n. `input` is on a CPU, floating-point, and contiguous in its memory format.
//
// Makes one pass over the input. It sums, in float64, the differences from each
// channel's first value, so that a mean far from zero costs no digits (Chan,
// Golub, LeVeque, "Algorithms for Computing the Sample Variance", The American
// Statistician 37, 1983, shifted data). The result does not depend on the
// number of threads.
at::Tensor channel_moments(const at::Tensor& input);

}  // namespace lockstep::nn
