#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "lockstep/comm/process_group.h"

// Forms of tensor_collectives.h that only the library's layers may use.
namespace lockstep::internal {

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
