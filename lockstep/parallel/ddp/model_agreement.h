#pragma once

#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep {

// Collective. Throws std::invalid_argument if the ranks' models differ.
//
// Among ranks of Lockstep every rank throws, and the message names the first
// rank, parameter and difference: names, shapes, strides, dtypes, requires_grad
// and their order are compared, of parameters and buffers. They meet in the
// group's store, at the cost of three requests a rank.
//
// On the wire it is what Python's DistributedDataParallel does, which knows
// only the number of trained parameters, their sizes and strides: a rank that
// differs from a Python rank is told that much.
//
// `parameters`: all; `trained`: those that require grad, one at least.
void verify_same_model(const std::vector<NamedParameter>& parameters,
                       const std::vector<NamedParameter>& buffers,
                       const std::vector<NamedParameter>& trained,
                       const ProcessGroupPtr& group);

}  // namespace lockstep
