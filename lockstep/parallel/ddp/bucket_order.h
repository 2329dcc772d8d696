#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"

namespace lockstep {

// The buckets of the first backward, of the `members` among `tensors`. Their
// gradients come in reverse order of the parameters, mostly, and so do these
// buckets. `limits`: none, one bucket for each dtype and device.
std::vector<std::vector<size_t>> first_buckets(
    const std::vector<at::Tensor>& tensors, const std::vector<size_t>& members,
    const BucketLimits& limits);

// Collective: the buckets of rank 0, which need not be as many as ours but
// have as many members in all. In two parts, the first of which has the same
// length on every rank: all members and the number of buckets, then the
// buckets' lengths. On the wire as in Python, on tensors of `device`.
std::vector<std::vector<size_t>> order_of_rank_zero(
    const std::vector<std::vector<size_t>>& buckets, c10::Device device,
    const ProcessGroupPtr& group);

}  // namespace lockstep
