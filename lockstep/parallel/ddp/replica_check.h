#pragma once

#include <vector>

#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep::internal {

// Collective. Checks that every rank's `tensors` have the same bits, by a
// digest of each. Throws std::runtime_error on all ranks, with the first rank
// that differs from rank 0 of the group and its first tensor that does. Reads
// all tensors once and sends 8 bytes for each.
void verify_equal_replicas(const std::vector<NamedParameter>& tensors,
                           const ProcessGroupPtr& group);

}  // namespace lockstep::internal
