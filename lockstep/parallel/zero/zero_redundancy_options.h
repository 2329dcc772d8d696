#pragma once

#include <optional>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Options of ZeroRedundancyOptimizer; those that
// torch.distributed.optim.ZeroRedundancyOptimizer has, too, have the same names
// (PyTorch documentation).
struct ZeroRedundancyOptions {
  // ---- Behaviour ----

  // The ranks that divide the state. Most programs leave it. Null means the
  // group of the DistributedDataParallel, or the default group.
  ProcessGroupPtr process_group{};

  // ---- Performance (not in Python) ----

  // Whether all ranks of a host use one copy of the parameters, so that nothing
  // must be gathered after a step. Set it to true if all ranks are on one host
  // and parameters take much memory; synchronize() must then be called before
  // parameters are read outside the wrapper. Only with a
  // DistributedDataParallel.
  bool shared_parameters{false};

  // Whether each parameter is stepped as soon as its gradient is final, in
  // backward(). Saves time if gradients are neither clipped, nor scaled, nor
  // accumulated. Only with a DistributedDataParallel, and not with
  // shared_parameters.
  bool step_in_backward{false};

  // Whether large parameters are divided over the ranks, or each belongs to one
  // rank. Most programs leave it. None means ShardingTraits of the optimizer
  // decides.
  std::optional<bool> cut_parameters{};
};

}  // namespace lockstep
