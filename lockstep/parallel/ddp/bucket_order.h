#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep::internal {

// Returns the buckets of the first backward, for the `members` among `tensors`.
// Gradients mostly become ready in reverse order of the parameters, so these
// buckets are in that order. Without `limits` there is one bucket for each
// dtype and device.
std::vector<std::vector<size_t>> first_buckets(
    const std::vector<at::Tensor>& tensors, const std::vector<size_t>& members,
    const BucketLimits& limits);

// Collective. Returns the buckets of rank 0; their number may differ from ours,
// but they have as many members in all. They are sent in two parts, of which
// the first has the same length on every rank: all members and the number of
// buckets; then the lengths of the buckets. On the wire as in Python, in
// tensors on `device`.
std::vector<std::vector<size_t>> order_of_rank_zero(
    const std::vector<std::vector<size_t>>& buckets, c10::Device device,
    const ProcessGroupPtr& group);

}  // namespace lockstep::internal
