#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/group.h"

namespace lockstep::shm {

// The sum, or average, of the ranks' sparse (COO) tensors, coalesced: entry by
// entry in the order of the ranks, the half types in float32. Each rank has as
// many entries as it likes. Gathers their numbers and sizes, then places and
// values, so a rank receives what all have together.
//
// Blocks until the deadline at most. Throws c10::DistBackendError with both
// descriptions if the ranks' tensors differ in shape, else as Group.
at::Tensor sum_sparse(Group& group, const at::Tensor& tensor, bool average,
                      const Deadline& deadline);

// Throws std::invalid_argument unless sum_sparse() takes such tensors.
void require_sparse(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

}  // namespace lockstep::shm
