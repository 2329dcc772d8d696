#pragma once

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

// The arguments of torch.optim.lr_scheduler.LambdaLR (PyTorch documentation).
struct LambdaLROptions {
  // A function from the epoch to a factor, or a list with one for each
  // parameter group. It must return the same on all ranks.
  PerGroup<LRLambda> lr_lambda;
};

// Sets the rates to the initial ones times a function of the epoch.
// A state does not hold the functions: construct the scheduler with the same
// ones before loading.
using LambdaLR = SchedulerWith<LambdaLROptions>;

// The arguments of torch.optim.lr_scheduler.MultiplicativeLR (PyTorch
// documentation).
struct MultiplicativeLROptions {
  // A function from the epoch to a factor, or a list with one for each
  // parameter group. It must return the same on all ranks.
  PerGroup<LRLambda> lr_lambda;
};

// Multiplies the rates in every epoch but the first by a function of the epoch.
// A state does not hold the functions: construct the scheduler with the same
// ones before loading.
using MultiplicativeLR = SchedulerWith<MultiplicativeLROptions>;

}  // namespace lockstep::optim
