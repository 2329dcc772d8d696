#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// Mean and variance of each channel over the samples of all ranks of a group.
struct GroupStatistics {
  ProcessGroupPtr group;
  double eps = 0;
  int64_t count = 0;  // values per channel on all ranks together
  // [C]; float32 for 16-bit inputs, else the input's dtype.
  at::Tensor mean{};
  at::Tensor invstd{};    // 1 / sqrt(variance + eps)
  at::Tensor variance{};  // CPU only; divided by count
  // CUDA only: [ranks with samples], int32; values per channel of each of them.
  at::Tensor counts{};
};

// Collective: one all_gather_into_tensor. `input`: [N, C, ...] of this rank,
// contiguous in its memory format; may be empty. The ranks' statistics are
// combined in the order of ranks (Chan, Golub, LeVeque, "Updating Formulae and
// a Pairwise Algorithm for Computing Sample Variances", 1979), so that every
// rank gets the same bits. On CPUs they are sent and combined as float64; on
// GPUs as in Python's SyncBatchNorm, whose ranks may be in the group.
//
// Updates the running statistics with the unbiased variance, weighted by
// `momentum`, unless they are undefined or there are no samples.
//
// Throws std::invalid_argument, on every rank and before anything is updated,
// if a channel has only one value on all ranks together.
GroupStatistics group_statistics(const at::Tensor& input,
                                 const at::Tensor& running_mean,
                                 const at::Tensor& running_var, double momentum,
                                 double eps, const ProcessGroupPtr& group);

}  // namespace lockstep::nn
