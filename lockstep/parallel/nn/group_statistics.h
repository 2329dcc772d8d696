#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// Mean and variance of each channel over the samples of all ranks of a group.
struct GroupStatistics {
  ProcessGroupPtr group;
  double eps = 0;
  int64_t count = 0;  // values a channel, of all ranks together
  // [C], float32 for half inputs, else of the input's dtype.
  at::Tensor mean{};
  at::Tensor invstd{};    // 1 / sqrt(variance + eps)
  at::Tensor variance{};  // CPU only; divided by count
  // CUDA only: [ranks with samples], int32, each one's values a channel.
  at::Tensor counts{};
};

// Collective: one all_gather_into_tensor. `input` [N, C, ...] of this rank,
// contiguous in its memory format, may be empty. The ranks' statistics are
// combined in the order of ranks (Chan, Golub, LeVeque, "Updating Formulae and
// a Pairwise Algorithm for Computing Sample Variances", 1979), so that every
// rank gets the same bits. On CPUs they travel and are combined as float64, on
// GPUs as Python's SyncBatchNorm does it, whose ranks may stand in the group.
//
// Updates the running statistics (unless they are undefined, or there are no
// samples) with the unbiased variance, weighted by `momentum`.
//
// Throws std::invalid_argument, on every rank and before anything is updated,
// if there is one value a channel in all.
GroupStatistics group_statistics(const at::Tensor& input,
                                 const at::Tensor& running_mean,
                                 const at::Tensor& running_var, double momentum,
                                 double eps, const ProcessGroupPtr& group);

}  // namespace lockstep::nn
