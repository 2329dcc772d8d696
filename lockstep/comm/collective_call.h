#pragma once

#include <ATen/core/Tensor.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collective_options.h"

// What every operation begins with: who calls what, and whether its arguments
// can be right. Internal to comm.
namespace lockstep {

// One operation, as its errors and its span describe it.
struct Call {
  Call(const char* name, const ProcessGroupPtr& given,
       std::chrono::milliseconds allowed);

  const char* operation;
  ProcessGroupPtr group;
  std::chrono::milliseconds timeout;
  // Of the group's collectives; 0 where it has none: point-to-point, or a
  // mistake that ended the call before it started.
  uint64_t number = 0;
  // As CurrentCall has them.
  uint64_t entry = 0;
  uint16_t parts = 1;
  // For the flight record, noted where they are checked, by member() and
  // require_reducible(): root or peer, of the default group, and the reduce
  // operation.
  mutable int peer = -1;
  mutable const char* reduce_op = nullptr;

  // "all_reduce #3 in group '1' on rank 5 (member 1 of 2)".
  std::string where() const;

  // For `throw call.mistake(...)`: the tail says what is allowed.
  std::invalid_argument mistake(const std::string& text) const;
  // Throws c10::DistBackendError for `error`: the time is over, or the world
  // has failed. `more` follows its text. Names the peers that are gone, and is
  // then an echo for the launcher (record.h), as is a connection that broke. A
  // Disagreement, a std::logic_error and a c10::Error that is no DistError are
  // this rank's own. Writes the flight record, and says where it is.
  [[noreturn]] void fail(const Deadline& deadline, const std::exception& error,
                         const std::string& more = {}) const;

  // What carries `tensor`, or tensors that only the library sees; a mistake
  // where the group has nothing for that device, or was destroyed.
  c10d::Backend& backend(const at::Tensor& tensor) const;
  c10d::Backend& backend() const;

  // Position of the default group's rank `global_rank` in the group.
  int member(const char* argument, int global_rank) const;
};

// "Float [2, 3]"; of several with commas between.
std::string describe(const at::Tensor& tensor);
std::string describe(const std::vector<at::Tensor>& list);

// What c10d's options of an operation have in common.
template <typename Options>
Options backend_options(const Call& call, bool async_op) {
  Options options;
  options.timeout = call.timeout;
  options.asyncOp = async_op;
  return options;
}
template <typename Options>
Options backend_options(const Call& call, const ReductionOptions& given) {
  auto options = backend_options<Options>(call, given.async_op);
  options.reduceOp = given.op;
  return options;
}

// Defined, strided and not quantized.
void require_dense(const Call& call, const char* argument,
                   const at::Tensor& tensor);
// One tensor a rank, dense, of the dtype and device of `like`.
void require_list(const Call& call, const char* argument,
                  const std::vector<at::Tensor>& list, const at::Tensor& like);
void require_shape(const Call& call, const char* argument,
                   const at::Tensor& tensor, const at::Tensor& like);
// Each tensor that the operation writes has memory, and shares it neither with
// another nor with itself.
void require_apart(const Call& call, const std::vector<at::Tensor>& written);
// Throws where `op` makes no sense on `dtype`.
void require_reducible(const Call& call, const c10d::ReduceOp& op,
                       at::ScalarType dtype);

const char* op_name(const c10d::ReduceOp& op);  // nullptr: not supported

// The dtype in which backends reduce `dtype`: itself, or a wider one of which
// all reductions give the same bits once cut back.
at::ScalarType reduced_as(at::ScalarType dtype);

// Whether every backend has `dtype`, under one name or another.
bool known_to_backends(at::ScalarType dtype);

}  // namespace lockstep
