#pragma once

#include <vector>

#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/ddp_options.h"

namespace lockstep::internal {

// Collective. Throws std::invalid_argument if the ranks' options or models
// differ. Returns whether all ranks run Lockstep.
//
// If all ranks run Lockstep, every rank throws, and the message names the first
// rank, option or parameter and difference: all options but init_sync and
// process_group, and names, shapes, strides, dtypes, requires_grad and order of
// parameters and buffers are compared. The ranks compare through
// the group's store, which costs each rank five requests. If a rank is
// Python's, a difference between ranks of Lockstep is named after 5 seconds.
//
// On the wire this does what Python's DistributedDataParallel does, which
// compares only the number of trained parameters, their sizes and strides: a
// rank that differs from a Python rank learns only that.
//
// `parameters`: all; `trained`: those that require grad, at least one.
bool verify_same_model(const DistributedDataParallelOptions& options,
                       const std::vector<NamedParameter>& parameters,
                       const std::vector<NamedParameter>& buffers,
                       const std::vector<NamedParameter>& trained);

}  // namespace lockstep::internal
