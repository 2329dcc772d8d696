#pragma once

#include <torch/optim/optimizer.h>

#include "lockstep/optim/lr_scheduler/linear_lr.h"

namespace lockstep::optim {

struct LinearScalingOptions {
  // How many times as large the batch of all ranks together is as the one for
  // which the optimizer's rates were chosen; above 0, or 0 for the world
  // size, with which each rank has the batch that one process had.
  double scale{0};

  // The number of steps of the warm-up. The paper takes those of five epochs.
  // Required.
  int64_t warmup_iters{0};
};

// The linear scaling rule with gradual warm-up (Goyal et al., "Accurate, Large
// Minibatch SGD: Training ImageNet in 1 Hour", 2017, sections 2.1 and 2.2): if
// the batch is k times as large, the learning rate is multiplied by k, and in
// the first steps it rises linearly from the old rate to the new one.
//
// Multiplies the rates of all groups, and returns the warm-up as the first part
// of a schedule that counts steps:
//
//   const auto warmup =
//       optim::scale_lr_linearly(optimizer, {.warmup_iters = 500});
//   optim::SequentialLR scheduler(
//       optimizer,
//       {.schedulers = {warmup, optim::CosineAnnealingLROptions{.T_max =
//       9500}},
//        .milestones = {warmup.total_iters}});
//
// Call it once, before the scheduler is made and before a snapshot is loaded.
// If the batch is smaller (k below 1) the rates need no warm-up: the returned
// one does nothing. The rule is for SGD; for Adam the square root of k is often
// taken as `scale`.
//
// Does not communicate. Throws std::invalid_argument for numbers out of range.
LinearLROptions scale_lr_linearly(torch::optim::Optimizer& optimizer,
                                  const LinearScalingOptions& options);

}  // namespace lockstep::optim
