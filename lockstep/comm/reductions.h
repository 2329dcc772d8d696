#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/collective_options.h"

// Collectives that reduce. collective_options.h says what all have in common.
namespace lockstep {

// `tensor` of every rank becomes the reduction over all ranks.
//
// A sparse tensor (COO) is reduced with SUM or AVG; every rank gets the
// coalesced sum, whatever entries it had itself.
WorkPtr all_reduce(const at::Tensor& tensor,
                   const ReductionOptions& options = {});

// all_reduce of each tensor, in one operation a dtype. At least one tensor,
// all dense and of one device; the ranks' lists have the same shapes in the
// same order.
WorkPtr all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                             const ReductionOptions& options = {});

// `tensor` of rank `dst` becomes the reduction over all ranks; on the others
// its content is undefined afterwards.
WorkPtr reduce(const at::Tensor& tensor, int dst,
               const ReductionOptions& options = {});

// `output` of rank i becomes the reduction over all ranks of their
// `input_list[i]`, which has its shape and dtype. The list holds one tensor a
// rank; their shapes may differ.
WorkPtr reduce_scatter(const at::Tensor& output,
                       const std::vector<at::Tensor>& input_list,
                       const ReductionOptions& options = {});

// The same with `input` as one tensor of world_size times as many elements as
// `output`: rank i's part is the i-th of equal parts in memory order, whether
// it is given concatenated or stacked.
WorkPtr reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                              const ReductionOptions& options = {});

}  // namespace lockstep
