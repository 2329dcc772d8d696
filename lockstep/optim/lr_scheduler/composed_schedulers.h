#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/base/required.h"
#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

// The arguments of torch.optim.lr_scheduler.SequentialLR (PyTorch
// documentation).
struct SequentialLROptions {
  // The schedulers, in their order; at least one. Only the first may be a
  // SequentialLR or ChainedScheduler (Python fails when it comes to another).
  Required<std::vector<Schedule>> schedulers;

  // The epochs in which the second and the following schedulers begin, in
  // ascending order; one less than schedulers.
  Required<std::vector<int64_t>> milestones;
};

// One scheduler after another:
//
//   optim::SequentialLR scheduler(
//       optimizer,
//       {.schedulers = {optim::LinearLROptions{.start_factor = 0.1,
//                                              .total_iters = 5},
//                       optim::CosineAnnealingLROptions{.T_max = 95}},
//        .milestones = {5}});
//
// A scheduler begins at its epoch 0, from the initial rates if it has a closed
// formula (StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR,
// PolynomialLR and CosineAnnealingLR have), otherwise as its get_lr() does.
//
// A SequentialLR that is the first scheduler of another one is an epoch ahead,
// as in Python; list its schedulers in the outer one instead.
using SequentialLR = SchedulerWith<SequentialLROptions>;

// The arguments of torch.optim.lr_scheduler.ChainedScheduler (PyTorch
// documentation).
struct ChainedSchedulerOptions {
  // The schedulers, in their order; at least one.
  Required<std::vector<Schedule>> schedulers;
};

// Several schedulers, each of which changes the rates that the one before has
// set, in every step:
//
//   optim::ChainedScheduler scheduler(
//       optimizer,
//       {.schedulers = {optim::ConstantLROptions{.factor = 0.1,
//                                                .total_iters = 20},
//                       optim::ExponentialLROptions{.gamma = 0.9}}});
//
// That has a meaning if all but the first multiply the rates (StepLR,
// MultiStepLR, ConstantLR, LinearLR, ExponentialLR, PolynomialLR,
// MultiplicativeLR); the others would overwrite them.
using ChainedScheduler = SchedulerWith<ChainedSchedulerOptions>;

}  // namespace lockstep::optim
