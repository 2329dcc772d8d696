#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/options/loss.h>

#include <cstdint>

#include "lockstep/comm/process_group.h"

namespace lockstep::nn {

// The names and defaults of torch::nn::CrossEntropyLossOptions. All ranks of
// the group must give the same options.
struct VocabParallelCrossEntropyOptions {
  // The ranks over which the classes are divided. Null means the default group.
  ProcessGroupPtr group{};

  // torch::kMean (over the targets that are not ignored), torch::kSum or
  // torch::kNone.
  torch::nn::CrossEntropyLossOptions::reduction_t reduction{torch::kMean};

  // Targets of this value add nothing to the loss.
  int64_t ignore_index{-100};

  // How much of the target goes to all classes alike, from 0 to 1.
  double label_smoothing{0};
};

// Cross entropy of logits of which each rank has a part of the classes: what
// loss_parallel() of torch.distributed.tensor.parallel computes (PyTorch
// documentation), after section 3 of Megatron-LM's paper. The logits are never
// gathered.
//
// `logits`: [..., part of the classes], the parts of torch.chunk(), as
// ColumnParallelLinear returns them: the last ranks may have fewer classes than
// the others, or none. `target`: the shape of `logits` without the last
// dimension, int64, equal on all ranks: classes of all ranks together. (The
// classes are in the last dimension; torch::cross_entropy_loss has them in
// dimension 1.) Returns the loss, equal on all ranks; a tensor of target's
// shape with kNone. 16-bit logits are computed and returned in float32.
//
// Collective: two all_reduce, of one number and of two (three with
// label_smoothing) for each target; none in backward. In a group of one, or
// without process groups, it is torch::cross_entropy_loss.
//
// Throws std::invalid_argument, on all ranks alike, for shapes that do not fit,
// for a target that is not a class, and if the ranks' parts are not those of
// torch.chunk(). backward() with create_graph throws std::runtime_error: there
// is no second derivative.
at::Tensor vocab_parallel_cross_entropy(
    const at::Tensor& logits, const at::Tensor& target,
    const VocabParallelCrossEntropyOptions& options = {});

}  // namespace lockstep::nn
