#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lockstep::internal {

// The interface of a c10d::Backend whose smallest all_reduce takes less time
// than the options, lists and works of c10d cost. Internal to comm.
class DirectReduce {
 public:
  // Does what the backend's allreduce() with asyncOp false does, on `count`
  // contiguous elements at `data` in host memory: it runs in the calling
  // thread, after pending operations, in the same order and with the same
  // errors. Allocates nothing.
  virtual void all_reduce_direct(void* data, int64_t count,
                                 at::ScalarType dtype,
                                 c10d::ReduceOp::RedOpType op,
                                 std::chrono::milliseconds timeout) = 0;

 protected:
  // Objects are owned as c10d::Backend.
  ~DirectReduce() = default;
};

}  // namespace lockstep::internal
