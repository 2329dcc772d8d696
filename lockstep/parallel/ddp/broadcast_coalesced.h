#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Collective. Every tensor of every rank becomes that of rank `src` of the
// default group. Tensors of one dtype and device travel together, in pieces of
// 250 MiB, in the order of their first: the operations that Python's
// DistributedDataParallel issues for the same tensors, two in flight.
//
// Blocking. Memory: two pieces. Errors: those of broadcast().
void broadcast_coalesced(const std::vector<at::Tensor>& tensors, int src,
                         const ProcessGroupPtr& group);

}  // namespace lockstep
