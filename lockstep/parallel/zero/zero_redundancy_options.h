#pragma once

#include <optional>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Options of ZeroRedundancyOptimizer; those that
// torch.distributed.optim.ZeroRedundancyOptimizer has, too, have the same names
// (PyTorch documentation).
struct ZeroRedundancyOptions {
  // Null: that of the DistributedDataParallel, or the default group.
  ProcessGroupPtr process_group{};
  // Whether all ranks of a host use one copy of the parameters, so that nothing
  // must be gathered after a step. Only with a DistributedDataParallel.
  bool shared_parameters{false};
  // Whether each parameter is stepped as soon as its gradient is final, in
  // backward(). Only with a DistributedDataParallel, and not with
  // shared_parameters.
  bool step_in_backward{false};
  // Whether large parameters are divided over the ranks, or each belongs to one
  // rank. None: ShardingTraits of the optimizer decides.
  std::optional<bool> cut_parameters{};
};

}  // namespace lockstep
