#pragma once

#include <chrono>
#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/process_group.h"

// The common rules of all collective operations, as in torch.distributed
// (PyTorch documentation, "Distributed communication package", Collective
// functions).
//
// Every rank of the group calls the same operation in the same order, with
// tensors whose shapes and dtypes belong together. Ranks in arguments (`dst`,
// `src`, `peer`) and in messages are those of the default group, as in Python;
// a position in a list of tensors is a rank of the group.
//
// Tensors may have any dtype that LibTorch has, any strides, and any device for
// which the group has a backend. A tensor that is written must not overlap
// itself or another one that is written (checked between dense tensors). A
// tensor that requires grad is used as data: operations are not differentiated.
// Complex tensors move, and sum, as pairs of reals.
//
// Blocking. With `async_op` false an operation blocks until it has ended on
// this rank (CPU) or is enqueued on the current stream (CUDA), and returns
// nullptr. With `async_op` true it returns at once; until Work::wait() has
// returned, the tensors must not be written, and those that receive must not be
// read. The Work keeps them alive. If the backend has futures,
// Work::getFuture() completes with the list of the tensors that were written,
// and then wait() is not needed; nor is it once isCompleted() has returned
// true. A wait that times out may be repeated, except that of a message
// (point_to_point.h).
//
// Continuations. What a program gives to then() or addCallback() of a future
// runs on a thread of the backend, and may call blocking operations, start
// others, and wait for their works and futures. It must not wait for a *future*
// of an operation that was started before: with lockstep, shm and mpi that
// thread may be the one that runs the operation, so the wait would never end.
// Call wait() of the work instead, or leave its future to the thread that goes
// on.
//
// Errors. A mistake that this rank can see by itself is std::invalid_argument:
// it says what was given, what is allowed, and what to do. Anything else is
// c10::DistBackendError with operation and number, group, rank, elapsed and
// allowed time, thrown by the operation or, with `async_op`, by Work::wait().
// wait() also throws if a tensor was modified in place while the operation was
// under way (seen by its version counter; a write through data_ptr() is not
// seen).
//
// If ranks disagree about operation, shapes, dtypes or order, what happens
// depends on the backend (Gloo sums what it got), unless the group compares
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
  // The ranks that take part. Null means the default group.
  ProcessGroupPtr group{};

  // Whether the operation returns at once, with a Work. Set it to true to
  // compute meanwhile.
  bool async_op{false};

  // How long the operation may take; more than 0, and with NCCL no longer than
  // the group's timeout. Most programs leave it. None means the group's
  // timeout.
  std::optional<std::chrono::milliseconds> timeout{};
};

struct ReductionOptions {
  // The same on all ranks.
  ReduceOp op{ReduceOp::SUM};

  // The following are those of CollectiveOptions.
  ProcessGroupPtr group{};
  bool async_op{false};
  std::optional<std::chrono::milliseconds> timeout{};
};

}  // namespace lockstep
