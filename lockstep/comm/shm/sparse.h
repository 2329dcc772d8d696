#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/group.h"

namespace lockstep::internal::shm {

// Returns the sum, or average, of the ranks' sparse (COO) tensors, coalesced.
// Entries are added in rank order, those of half types in float32. Each rank
// may have any number of entries. Gathers these numbers and the sizes, then
// places and values, so every rank receives the entries of all ranks.
//
// Blocks until the deadline at most. Throws c10::DistBackendError with both
// descriptions if the ranks' tensors differ in shape; otherwise throws as Group
// does.
at::Tensor sum_sparse(Group& group, const at::Tensor& tensor, bool average,
                      const Deadline& deadline);

// Throws std::invalid_argument unless sum_sparse() takes such tensors.
void require_sparse(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

}  // namespace lockstep::internal::shm
