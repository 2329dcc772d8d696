#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collective_options.h"

// The beginning of every operation: the description of the call, and the checks
// of its arguments. Internal to comm.
namespace lockstep::internal {

// One operation, as its errors and its span describe it.
struct Call {
  Call(const char* name, const ProcessGroupPtr& given,
       std::optional<std::chrono::milliseconds> allowed);

  const char* operation;
  ProcessGroupPtr group;
  std::chrono::milliseconds timeout;
  // The sequence number; 0 if there is none, because this is a point-to-point
  // operation or a mistake ended the call before it started.
  uint64_t number = 0;
  // The same as in CurrentCall.
  uint64_t entry = 0;
  uint16_t parts = 1;
  // For the flight record, noted by member() and require_reducible() when they
  // check them: the root or peer, as a rank of the default group, and the
  // reduce operation.
  mutable int peer = -1;
  mutable const char* reduce_op = nullptr;
  // Whether the tensors are on a device with streams, noted by backend().
  mutable bool on_stream = false;

  // Sets `number` and `entry`.
  void take_numbers();

  // "all_reduce #3 in group '1' on rank 5 (member 1 of 2)".
  std::string where() const;

  // Returns the exception for `throw call.mistake(...)`. `text` says what was
  // given and what is allowed.
  std::invalid_argument mistake(const std::string& text) const;
  // Throws c10::DistBackendError for `error`: the time is over, or something
  // outside this rank has failed. `more` follows its text. The text names the
  // peers that are gone. If there are such peers, or a connection broke, the
  // failure is an echo for the launcher (record.h). A Disagreement, a
  // std::logic_error and a c10::Error that is not a DistError are this rank's
  // own failures and no echoes. Writes the flight record, and the text says
  // where.
  [[noreturn]] void fail(const Deadline& deadline, const std::exception& error,
                         const std::string& more = {}) const;

  // Returns the backend for `tensor`, or for tensors that only the library
  // sees. Throws a mistake() if the group has no backend for that device, or
  // was destroyed.
  c10d::Backend& backend(const at::Tensor& tensor) const {
    return backend(tensor.device().type());
  }
  c10d::Backend& backend() const {
    return backend(group->control_device().type());
  }

  // Returns the rank in the group of the default group's rank `global_rank`.
  // Throws a mistake() that names `argument` if that rank is not a member.
  int member(const char* argument, int global_rank) const;

 private:
  c10d::Backend& backend(c10::DeviceType device) const;
};

// Returns dtype and shape, "Float [2, 3]"; several are separated by commas.
std::string describe(const at::Tensor& tensor);
std::string describe(at::TensorList list);

// Returns c10d's options for an operation, with those fields filled in that the
// options of all operations have.
template <typename Options>
Options backend_options(const Call& call, bool async_op) {
  Options options;
  options.timeout = call.timeout;
  // c10d's NCCL returns no work for a synchronous operation (since
  // LibTorch 2.8), and only a work has errors and ends in the flight record.
  options.asyncOp = async_op || call.on_stream;
  return options;
}
template <typename Options>
Options backend_options(const Call& call, const ReductionOptions& given) {
  auto options = backend_options<Options>(call, given.async_op);
  options.reduceOp = given.op;
  return options;
}

// Throws unless `tensor` is defined, strided and not quantized.
void require_dense(const Call& call, const char* argument,
                   const at::Tensor& tensor);
// Throws unless `list` holds one dense tensor for each rank, all of the dtype
// and device of `like`.
void require_list(const Call& call, const char* argument, at::TensorList list,
                  const at::Tensor& like);
void require_shape(const Call& call, const char* argument,
                   const at::Tensor& tensor, const at::Tensor& like);
// Throws if `op` makes no sense on `dtype`.
void require_reducible(const Call& call, const c10d::ReduceOp& op,
                       at::ScalarType dtype);

const char* op_name(const c10d::ReduceOp& op);  // null if not supported

}  // namespace lockstep::internal
