#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/comm/collective_options.h"

// Collectives that move data and compute nothing. collective_options.h says
// what all have in common. Tensors must be dense here.
namespace lockstep {

// Copies rank `src`'s `tensor` to `tensor` on every rank.
WorkPtr broadcast(const at::Tensor& tensor, int src,
                  const CollectiveOptions& options = {});

// Copies rank i's `tensor` to `tensor_list[i]` on every rank. The list holds
// one tensor for each rank, with the same shapes on every rank. Shapes may
// differ between ranks: then `tensor_list[i]` has the shape of rank i's tensor,
// and the operation is one broadcast for each rank.
WorkPtr all_gather(const std::vector<at::Tensor>& tensor_list,
                   const at::Tensor& tensor,
                   const CollectiveOptions& options = {});

// Does the same with one output tensor, which has world_size times as many
// elements as `input_tensor`. Its shape may concatenate the inputs or stack
// them. `input_tensor` may be this rank's own part of `output_tensor`.
WorkPtr all_gather_into_tensor(const at::Tensor& output_tensor,
                               const at::Tensor& input_tensor,
                               const CollectiveOptions& options = {});

// Copies rank i's `input_tensor_list[k]` to `output_tensor_lists[i][k]`. All
// tensors are on one device; their shapes are equal on all ranks.
WorkPtr all_gather_coalesced(
    const std::vector<std::vector<at::Tensor>>& output_tensor_lists,
    const std::vector<at::Tensor>& input_tensor_list,
    const CollectiveOptions& options = {});

// Copies rank i's `tensor` to `gather_list[i]` on rank `dst`; all have one
// shape. The list is empty on the other ranks.
WorkPtr gather(const at::Tensor& tensor,
               const std::vector<at::Tensor>& gather_list = {}, int dst = 0,
               const CollectiveOptions& options = {});

// Copies `scatter_list[i]` on rank `src` to `tensor` on rank i; all have one
// shape. The list is empty on the other ranks.
WorkPtr scatter(const at::Tensor& tensor,
                const std::vector<at::Tensor>& scatter_list = {}, int src = 0,
                const CollectiveOptions& options = {});

// Copies rank i's `input_tensor_list[j]` to `output_tensor_list[i]` on rank j.
// Shapes may differ, as long as both ends of each pair agree.
WorkPtr all_to_all(const std::vector<at::Tensor>& output_tensor_list,
                   const std::vector<at::Tensor>& input_tensor_list,
                   const CollectiveOptions& options = {});

struct AllToAllSingleOptions {
  // How many rows of `output` come from each rank, and how many rows of `input`
  // go to each: one number for each rank, which add up to the number of rows
  // (the size of dimension 0). Empty means equal parts.
  std::vector<int64_t> output_split_sizes{};
  std::vector<int64_t> input_split_sizes{};

  // The following are those of CollectiveOptions.
  ProcessGroupPtr group{};
  bool async_op{false};
  std::optional<std::chrono::milliseconds> timeout{};
};

// Does all_to_all with the rows of one tensor. Both tensors have at least one
// dimension, and rows of one size.
WorkPtr all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const AllToAllSingleOptions& options = {});

}  // namespace lockstep
