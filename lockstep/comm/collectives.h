#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "lockstep/comm/process_group.h"

// The collective operations, after torch.distributed (PyTorch documentation,
// "Distributed communication package", Collective functions).
//
// Common to all. Every rank of the group calls the same operation in the same
// order with tensors of the same shape and dtype. A tensor belongs to a device
// that the group has a backend for. Ranks in arguments (`dst`, `src`) are
// those of the default group, as in Python.
//
// Blocking: with `async_op` false, until the operation has ended on this rank
// (CPU) or is enqueued on the current stream (CUDA); returns nullptr. With
// `async_op` true, returns at once; the tensors must live and not be touched
// until Work::wait() has returned, and must be contiguous.
//
// Errors: std::invalid_argument for a mistake that this rank can see by
// itself; c10::DistBackendError that names operation, group, rank, elapsed and
// allowed time for anything else, from here or, with `async_op`, from
// Work::wait().
namespace lockstep {

using ReduceOp = c10d::ReduceOp;
using Work = c10d::Work;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// None: the default group. Timeout zero: the group's.
struct AllReduceOptions {
  ReduceOp op{ReduceOp::SUM};
  ProcessGroupPtr group{};
  bool async_op{false};
  std::chrono::milliseconds timeout{0};
};

// `tensor` of every rank becomes the reduction over all ranks. AVG divides by
// the group's size before it sums, and is for floating-point tensors.
WorkPtr all_reduce(const at::Tensor& tensor,
                   const AllReduceOptions& options = {});

struct ReduceOptions {
  ReduceOp op{ReduceOp::SUM};
  ProcessGroupPtr group{};
  bool async_op{false};
  std::chrono::milliseconds timeout{0};
};

// `tensor` of rank `dst` becomes the reduction over all ranks; on the others
// its content is undefined afterwards.
WorkPtr reduce(const at::Tensor& tensor, int dst,
               const ReduceOptions& options = {});

struct BroadcastOptions {
  ProcessGroupPtr group{};
  bool async_op{false};
  std::chrono::milliseconds timeout{0};
};

// `tensor` of every rank becomes that of rank `src`.
WorkPtr broadcast(const at::Tensor& tensor, int src,
                  const BroadcastOptions& options = {});

struct AllGatherOptions {
  ProcessGroupPtr group{};
  bool async_op{false};
  std::chrono::milliseconds timeout{0};
};

// `tensor_list[i]` becomes rank i's `tensor`. The list holds one tensor a
// rank, of the shape and dtype of `tensor`.
WorkPtr all_gather(std::vector<at::Tensor>& tensor_list,
                   const at::Tensor& tensor,
                   const AllGatherOptions& options = {});

struct BarrierOptions {
  ProcessGroupPtr group{};
  bool async_op{false};
  std::chrono::milliseconds timeout{0};
};

// Returns when every rank of the group has called it.
WorkPtr barrier(const BarrierOptions& options = {});

}  // namespace lockstep
