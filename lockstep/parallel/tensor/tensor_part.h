#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "lockstep/comm/process_group.h"
#include "lockstep/state/box.h"

// How a module of tensor parallelism finds its group and its part of a
// parameter.
namespace lockstep::internal {

// Returns the group that a module with the option `group` communicates in:
// `given`, or else the default group. Returns null if that group has one rank,
// or if there is none: then nothing is communicated.
ProcessGroupPtr tensor_group(const ProcessGroupPtr& given);

// Returns which of `size` indices this rank has: those that torch.chunk() and
// DTensor's Shard give it, so that all ranks but the last ones have
// ceil(size / ranks) and the last ones may have none. All of them if `group` is
// null.
Range tensor_part(int64_t size, const ProcessGroupPtr& group);

// Returns this rank's part of dimension `dim` of `whole` as a new leaf tensor
// in memory of its own, with the layout (comm/tensor_layout.h) that says so,
// and with requires_grad as `whole` has it. If `group` is null, the copy is
// whole and has no layout. `whole` may be undefined, and then so is the result.
at::Tensor part_of_parameter(const at::Tensor& whole, int64_t dim,
                             const ProcessGroupPtr& group);

// Returns a copy of `whole` as a new leaf tensor, for a parameter that every
// rank has whole. `whole` may be undefined.
at::Tensor whole_parameter(const at::Tensor& whole);

// Forms of tensor_collectives.h that only the library's layers may use.

// Does reduce_from_tensor_group() in the memory of `input`, which must be a
// contiguous result that no one else uses and no node of autograd has saved.
// `group` is not null.
at::Tensor reduce_in_place(const at::Tensor& input,
                           const ProcessGroupPtr& group);

// Does copy_to_tensor_group() with two tensors, whose gradients are added up in
// one call. Either may be undefined. `group` is not null.
std::tuple<at::Tensor, at::Tensor> copy_both(const at::Tensor& first,
                                             const at::Tensor& second,
                                             const ProcessGroupPtr& group);

}  // namespace lockstep::internal
