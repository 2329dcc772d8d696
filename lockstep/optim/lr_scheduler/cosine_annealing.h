#pragma once

#include <cstdint>

#include "lockstep/base/required.h"
#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

// The arguments of torch.optim.lr_scheduler.CosineAnnealingLR (PyTorch
// documentation).
struct CosineAnnealingLROptions {
  // The epoch in which the rates reach eta_min; 1 or more. After it
  // the rates rise again.
  Required<int64_t> T_max;

  // The lowest rate.
  double eta_min{0};
};

// Lets the rates fall from the initial ones to eta_min along half a cosine:
// Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts"
// (ICLR 2017), equation 5, without restarts.
using CosineAnnealingLR = SchedulerWith<CosineAnnealingLROptions>;

// The arguments of torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
// (PyTorch documentation).
struct CosineAnnealingWarmRestartsOptions {
  // The number of epochs until the first restart; 1 or more.
  Required<int64_t> T_0;

  // The factor by which each period is longer than the one before; 1 or more.
  int64_t T_mult{1};

  // The rate before a restart.
  double eta_min{0};
};

// Lets the rates fall from the initial ones to eta_min along half a cosine, and
// then begins again: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent
// with Warm Restarts" (ICLR 2017), equation 5. Python's step(epoch), with a
// fraction of an epoch, does not exist here: count steps instead.
using CosineAnnealingWarmRestarts =
    SchedulerWith<CosineAnnealingWarmRestartsOptions>;

}  // namespace lockstep::optim
