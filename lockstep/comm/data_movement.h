#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/collective_options.h"

// Collectives that move data and compute nothing. collective_options.h says
// what all have in common. Tensors here are dense.
namespace lockstep {

// `tensor` of every rank becomes that of rank `src`.
WorkPtr broadcast(const at::Tensor& tensor, int src,
                  const CollectiveOptions& options = {});

// `tensor_list[i]` becomes rank i's `tensor`. The list holds one tensor a
// rank, and is the same on every rank. Shapes may differ by rank: then
// `tensor_list[i]` has the shape of rank i's tensor, and the operation is one
// broadcast a rank.
WorkPtr all_gather(const std::vector<at::Tensor>& tensor_list,
                   const at::Tensor& tensor,
                   const CollectiveOptions& options = {});

// The same into one tensor of world_size times as many elements as
// `input_tensor`, whether it is shaped to concatenate or to stack them.
// `input_tensor` may be this rank's own part of `output_tensor`.
WorkPtr all_gather_into_tensor(const at::Tensor& output_tensor,
                               const at::Tensor& input_tensor,
                               const CollectiveOptions& options = {});

// `output_tensor_lists[i][k]` becomes rank i's `input_tensor_list[k]`. All of
// one device; equal shapes on all ranks.
WorkPtr all_gather_coalesced(
    const std::vector<std::vector<at::Tensor>>& output_tensor_lists,
    const std::vector<at::Tensor>& input_tensor_list,
    const CollectiveOptions& options = {});

// On rank `dst`, `gather_list[i]` becomes rank i's `tensor`, all of one shape.
// The list is empty on the other ranks.
WorkPtr gather(const at::Tensor& tensor,
               const std::vector<at::Tensor>& gather_list = {}, int dst = 0,
               const CollectiveOptions& options = {});

// `tensor` of rank i becomes `scatter_list[i]` of rank `src`, all of one
// shape. The list is empty on the other ranks.
WorkPtr scatter(const at::Tensor& tensor,
                const std::vector<at::Tensor>& scatter_list = {}, int src = 0,
                const CollectiveOptions& options = {});

// `output_tensor_list[i]` becomes rank i's `input_tensor_list[j]`, where j is
// this rank. Shapes may differ, as long as both ends of each pair agree.
WorkPtr all_to_all(const std::vector<at::Tensor>& output_tensor_list,
                   const std::vector<at::Tensor>& input_tensor_list,
                   const CollectiveOptions& options = {});

struct AllToAllSingleOptions {
  // How many of `output`'s rows come from each rank, and how many of `input`'s
  // go to each: one number a rank, which add up to the rows there are (the
  // size of dimension 0). Empty: equal parts.
  std::vector<int64_t> output_split_sizes{};
  std::vector<int64_t> input_split_sizes{};
  ProcessGroupPtr group{};  // none: the default group
  bool async_op{false};
  std::chrono::milliseconds timeout{0};  // zero: the group's
};

// all_to_all over the rows of one tensor. Both have at least one dimension and
// rows of one size.
WorkPtr all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const AllToAllSingleOptions& options = {});

}  // namespace lockstep
