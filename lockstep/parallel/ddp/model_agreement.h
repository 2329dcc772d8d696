#pragma once

#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep {

// Collective. Throws std::invalid_argument, on every rank, that names the first
// rank, parameter and difference if the ranks of `group` do not have the same
// names, shapes, dtypes and requires_grad in the same order. `kind` is the word
// in the message: "parameter", "buffer".
void verify_same_across_ranks(const std::vector<NamedParameter>& tensors,
                              const char* kind, const ProcessGroupPtr& group);

// Collective. Every tensor of every rank becomes that of rank `src` of the
// default group, whatever its dtype; tensors of one device travel together, in
// pieces of 25 MiB and more.
void broadcast_coalesced(const std::vector<at::Tensor>& tensors, int src,
                         const ProcessGroupPtr& group);

}  // namespace lockstep
