#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/collective_options.h"

// Collectives that reduce. collective_options.h says what all have in common.
namespace lockstep {

// Replaces `tensor` on every rank by the reduction over all ranks.
//
// A sparse tensor (COO) is reduced with SUM or AVG; every rank gets the
// coalesced sum, whatever entries it had itself.
WorkPtr all_reduce(const at::Tensor& tensor,
                   const ReductionOptions& options = {});

// Does all_reduce with each tensor, in one operation for each dtype. The list
// holds at least one tensor, all dense and on one device; the ranks' lists have
// the same shapes in the same order.
WorkPtr all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                             const ReductionOptions& options = {});

// Replaces `tensor` on rank `dst` by the reduction over all ranks; on the
// others its content is undefined afterwards.
WorkPtr reduce(const at::Tensor& tensor, int dst,
               const ReductionOptions& options = {});

// Writes to `output` on rank i the reduction over all ranks of `input_list[i]`,
// which has the shape and dtype of that output. The list holds one tensor for
// each rank; their shapes may differ.
WorkPtr reduce_scatter(const at::Tensor& output,
                       const std::vector<at::Tensor>& input_list,
                       const ReductionOptions& options = {});

// Does the same with one input tensor of world_size times as many elements as
// `output`. Rank i gets the i-th of world_size equal parts in memory order,
// whether the shape of `input` concatenates or stacks them.
WorkPtr reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                              const ReductionOptions& options = {});

}  // namespace lockstep
