#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep::internal {

// Collective. Compares the bits of every rank's `tensors`, by a digest of each.
// Returns the first rank that differs from rank 0 of the group, with its first
// tensor that does: "'w' of rank 2 differs from that of rank 0", where names
// are quoted by the caller; empty if there is none. Reads all tensors once, and
// sends 16 bytes if all are the same.
std::string replica_difference(const std::vector<NamedParameter>& tensors,
                               const ProcessGroupPtr& group);

}  // namespace lockstep::internal
