#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// Collective. Gives every rank the tensors of rank `src` of the default group.
// Tensors of one dtype and device travel together, in pieces of 250 MiB, in the
// order of the pieces' first tensors. These are the operations that Python's
// DistributedDataParallel issues for the same tensors; two are in flight.
//
// Blocking. Memory: two pieces. Errors: those of broadcast().
void broadcast_coalesced(const std::vector<at::Tensor>& tensors, int src,
                         const ProcessGroupPtr& group);

}  // namespace lockstep::internal
