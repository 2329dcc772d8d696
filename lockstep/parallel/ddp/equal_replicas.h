#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep::internal {

// Collective. Gives every rank the tensors of rank `src` of the default group.
// Tensors of one dtype and device travel together, in pieces of 250 MiB, in the
// order of the pieces' first tensors. These are the operations that Python's
// DistributedDataParallel issues for the same tensors; two are in flight.
//
// Blocking. Memory: two pieces. Errors: those of broadcast().
void broadcast_coalesced(const std::vector<at::Tensor>& tensors, int src,
                         const ProcessGroupPtr& group);

// Collective. Compares the bits of every rank's `tensors`, by a digest of each.
// Returns the first rank that differs from rank 0 of the group, with its first
// tensor that does: "'w' of rank 2 differs from that of rank 0", where names
// are quoted by the caller; empty if there is none. Reads all tensors once, and
// sends 16 bytes if all are the same.
std::string replica_difference(const std::vector<NamedParameter>& tensors,
                               const ProcessGroupPtr& group);

}  // namespace lockstep::internal
