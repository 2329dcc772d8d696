#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/process_group.h"

// What all collective operations have in common, after torch.distributed
// (PyTorch documentation, "Distributed communication package", Collective
// functions).
//
// Every rank of the group calls the same operation in the same order with
// tensors of the shapes and dtypes that belong together. Ranks in arguments
// (`dst`, `src`, `peer`) and in messages are those of the default group, as in
// Python; a position in a list of tensors is a rank of the group.
//
// Tensors. Any dtype that LibTorch has; of a device that the group has a
// backend for; any strides, where what is written must not overlap itself or
// another (which is checked between dense tensors). A tensor that requires grad
// is used as data: operations are not differentiated. Complex tensors move, and
// sum, as pairs of reals.
//
// Blocking. With `async_op` false, until the operation has ended on this rank
// (CPU) or is enqueued on the current stream (CUDA); returns nullptr. With
// `async_op` true, returns at once; the tensors must not be written, and those
// that receive not read, until Work::wait() has returned. Work keeps them
// alive. Work::getFuture(), where the backend has futures, completes with the
// list of the tensors that were written, and stands for the wait; so does
// isCompleted() once it is true. A wait that times out may be repeated, except
// that of a message (point_to_point.h).
//
// Errors. std::invalid_argument for a mistake that this rank can see by
// itself: what was given, what is allowed, what to do. c10::DistBackendError
// with operation and number, group, rank, elapsed and allowed time for
// anything else, from here or, with `async_op`, from Work::wait(). wait() also
// throws if a tensor was modified in place while the operation was under way
// (seen by its version counter; a write through data_ptr() is not seen).
//
// Ranks that disagree about operation, shapes, dtypes or order: what happens
// is the backend's affair (Gloo sums what it got) unless the group checks
// each call; see ProcessGroup::checks_calls().
namespace lockstep {

// SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR. Which dtypes each takes:
//   SUM, AVG       floating point and complex; SUM integers too
//   PRODUCT        floating point, integers, bool
//   MIN, MAX       floating point, integers, bool
//   BAND, BOR, BXOR  integers, bool
// 16-bit and unsigned integers are reduced in a wider type and wrap as they do
// in C++; uint64 and the 8-bit floating-point types cannot be reduced.
using ReduceOp = c10d::ReduceOp;

using Work = c10d::Work;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct CollectiveOptions {
  ProcessGroupPtr group{};  // none: the default group
  bool async_op{false};
  std::chrono::milliseconds timeout{0};  // zero: the group's
};

struct ReductionOptions {
  ReduceOp op{ReduceOp::SUM};
  ProcessGroupPtr group{};  // none: the default group
  bool async_op{false};
  std::chrono::milliseconds timeout{0};  // zero: the group's
};

}  // namespace lockstep
