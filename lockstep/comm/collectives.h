#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/comm/collective_options.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/point_to_point.h"

// Every collective operation: these, and those of object_collectives.h and
// point_to_point.h. collective_options.h says what all have in common.
namespace lockstep {

// These reduce.

// Replaces `tensor` on every rank by the reduction over all ranks.
//
// A sparse tensor (COO) is reduced with SUM or AVG; every rank gets the
// coalesced sum, whatever entries it had itself.
WorkPtr all_reduce(const at::Tensor& tensor,
                   const ReductionOptions& options = {});

// Does all_reduce with each tensor, in one operation for each dtype. The list
// holds at least one tensor, all dense and on one device; the ranks' lists have
// the same shapes in the same order.
WorkPtr all_reduce_coalesced(at::TensorList tensors,
                             const ReductionOptions& options = {});

// Replaces `tensor` on rank `dst` by the reduction over all ranks; on the
// others its content is undefined afterwards.
WorkPtr reduce(const at::Tensor& tensor, int dst,
               const ReductionOptions& options = {});

// Writes to `output` on rank i the reduction over all ranks of `input_list[i]`,
// which has the shape and dtype of that output. The list holds one tensor for
// each rank; their shapes may differ.
WorkPtr reduce_scatter(const at::Tensor& output, at::TensorList input_list,
                       const ReductionOptions& options = {});

// Does the same with one input tensor of world_size times as many elements as
// `output`. Rank i gets the i-th of world_size equal parts in memory order,
// whether the shape of `input` concatenates or stacks them.
WorkPtr reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                              const ReductionOptions& options = {});

// These move data and compute nothing. Tensors must be dense here.

// Copies rank `src`'s `tensor` to `tensor` on every rank.
WorkPtr broadcast(const at::Tensor& tensor, int src,
                  const CollectiveOptions& options = {});

// Copies rank i's `tensor` to `tensor_list[i]` on every rank. The list holds
// one tensor for each rank, with the same shapes on every rank. Shapes may
// differ between ranks: then `tensor_list[i]` has the shape of rank i's tensor,
// and the operation is one broadcast for each rank.
WorkPtr all_gather(at::TensorList tensor_list, const at::Tensor& tensor,
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
    at::TensorList input_tensor_list, const CollectiveOptions& options = {});

// Copies rank i's `tensor` to `gather_list[i]` on rank `dst`; all have one
// shape. The list is empty on the other ranks.
WorkPtr gather(const at::Tensor& tensor, at::TensorList gather_list = {},
               int dst = 0, const CollectiveOptions& options = {});

// Copies `scatter_list[i]` on rank `src` to `tensor` on rank i; all have one
// shape. The list is empty on the other ranks.
WorkPtr scatter(const at::Tensor& tensor, at::TensorList scatter_list = {},
                int src = 0, const CollectiveOptions& options = {});

// Copies rank i's `input_tensor_list[j]` to `output_tensor_list[i]` on rank j.
// Shapes may differ, as long as both ends of each pair agree.
WorkPtr all_to_all(at::TensorList output_tensor_list,
                   at::TensorList input_tensor_list,
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

// Blocks until every rank of the group has called it. With async_op, returns at
// once, and Work::wait() blocks.
WorkPtr barrier(const CollectiveOptions& options = {});

// Group and timeout as in CollectiveOptions.
struct MonitoredBarrierOptions {
  ProcessGroupPtr group{};
  std::optional<std::chrono::milliseconds> timeout{};
};

// A barrier that names the ranks that are missing: at the timeout every rank
// that has come throws c10::DistBackendError with the ranks that have not.
// (Python's names one of them, or all of them on rank 0 with wait_all_ranks.)
// Always blocks. Rank 0, with which the store may leave, returns when the
// others know that all have come: at the timeout at the latest, and after 2 s
// at most.
//
// It uses the group's store, not its backend: it takes some 0.3 ms a rank, and
// works with any backend, even while the backend hangs. All ranks must be
// Lockstep's: Python's monitored_barrier uses another protocol.
void monitored_barrier(const MonitoredBarrierOptions& options = {});

}  // namespace lockstep
