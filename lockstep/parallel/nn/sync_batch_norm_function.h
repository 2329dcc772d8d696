#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

struct SyncBatchNormCall {
  at::Tensor weight{}, bias{};               // undefined means 1 and 0
  at::Tensor running_mean{}, running_var{};  // undefined if not tracked
  double momentum = 0;                       // of the running statistics
  double eps = 0;
  ProcessGroupPtr group{};
};

// Returns (input - mean) / sqrt(variance + eps) * weight + bias, with autograd.
// Mean and variance are those of each channel over the samples of all ranks.
// `input`, [N, C, ...], is contiguous in its memory format, and so is the
// result; it may be empty on some ranks or all. It follows SyncBatchNorm in
// torch/nn/modules/_functions.py.
//
// Collective: one all_gather_into_tensor. On CPUs the ranks send and combine
// mean and variance as float64; on GPUs they send what Python sends, so that
// ranks of Python may be in the group. LibTorch sums a rank's own float32 input
// in float32 if it is [N, C] or channels-last, so from some 10 million values
// per channel and thread on its variance is inexact. Updates the running
// statistics with the unbiased variance, unless there are no samples.
//
// If `input` requires grad, which must be so on all ranks or on none, backward
// is collective (one all_reduce), because the statistics depend on every rank's
// input.
//
// Throws std::invalid_argument, on every rank and before anything is updated,
// if a channel has only one value on all ranks together.
at::Tensor sync_batch_norm(const at::Tensor& input,
                           const SyncBatchNormCall& call);

}  // namespace lockstep::internal
