#pragma once

#include <cstdint>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

// The arguments of torch.optim.swa_utils.SWALR (PyTorch documentation, Weight
// Averaging).
struct SWALROptions {
  // The rate to go to.
  PerGroup<double> swa_lr;

  // The number of epochs in which it is reached; 0 or more.
  int64_t anneal_epochs{10};

  // The shape of the way to it.
  AnnealStrategy anneal_strategy{AnnealStrategy::cos};
};

// Goes from the present rates to a constant one, at which weights are averaged:
// Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
// Generalization" (UAI 2018). It may be constructed before training beside
// another scheduler, and stepped instead of that from some epoch on: it starts
// from the rates that it then finds.
using SWALR = SchedulerWith<SWALROptions>;

}  // namespace lockstep::optim
