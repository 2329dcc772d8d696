#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

#include "lockstep/base/required.h"
#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

// The arguments of torch.optim.lr_scheduler.ConstantLR (PyTorch documentation).
struct ConstantLROptions {
  // The factor of the first epochs; above 0, at most 1. Python takes 0, too,
  // and then fails in epoch total_iters.
  double factor{1.0 / 3};

  // The number of these epochs.
  int64_t total_iters{5};
};

// Multiplies the rates by `factor` until epoch total_iters.
using ConstantLR = SchedulerWith<ConstantLROptions>;

// The arguments of torch.optim.lr_scheduler.LinearLR (PyTorch documentation).
struct LinearLROptions {
  // The factors of epoch 0 (above 0, at most 1) and of epoch total_iters (from
  // 0 to 1).
  double start_factor{1.0 / 3};
  double end_factor{1.0};

  // The epoch in which end_factor is reached.
  int64_t total_iters{5};
};

// Multiplies the rates by a factor that changes linearly from start_factor to
// end_factor, and then stays. As the first part of a SequentialLR this is a
// warm-up; scale_lr_linearly() makes the options for one.
using LinearLR = SchedulerWith<LinearLROptions>;

// The arguments of torch.optim.lr_scheduler.PolynomialLR (PyTorch
// documentation).
struct PolynomialLROptions {
  // The epoch in which the rates reach 0.
  int64_t total_iters{5};

  // See PolynomialLR.
  double power{1.0};
};

// Multiplies the initial rates by (1 - epoch / total_iters) to the power of
// `power`, until epoch total_iters.
using PolynomialLR = SchedulerWith<PolynomialLROptions>;

// The arguments of torch.optim.lr_scheduler.ExponentialLR (PyTorch
// documentation).
struct ExponentialLROptions {
  // The factor of each epoch.
  Required<double> gamma;
};

// Multiplies the rates by gamma in every epoch.
using ExponentialLR = SchedulerWith<ExponentialLROptions>;

// The arguments of torch.optim.lr_scheduler.StepLR (PyTorch documentation).
struct StepLROptions {
  // The number of epochs from one decay to the next; 1 or more.
  Required<int64_t> step_size;

  // The factor of each decay.
  double gamma{0.1};
};

// Multiplies the rates by gamma every step_size epochs.
using StepLR = SchedulerWith<StepLROptions>;

// The arguments of torch.optim.lr_scheduler.MultiStepLR (PyTorch
// documentation).
struct MultiStepLROptions {
  // The epochs in which the rates decay, in any order; an epoch that is named
  // twice decays twice. The list may be empty.
  Required<std::vector<int64_t>> milestones;

  // The factor of each decay.
  double gamma{0.1};
};

// Multiplies the rates by gamma in each of the milestones.
using MultiStepLR = SchedulerWith<MultiStepLROptions>;

struct LinearScalingOptions {
  // How many times as large the batch of all ranks together is as the one for
  // which the optimizer's rates were chosen; above 0, or 0 for the world
  // size, with which each rank has the batch that one process had.
  double scale{0};

  // The number of steps of the warm-up. The paper takes those of five epochs.
  Required<int64_t> warmup_iters;
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
