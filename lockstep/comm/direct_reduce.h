#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lockstep {

// What a c10d::Backend also is where its smallest all_reduce takes less time
// than the options, lists and works of c10d cost. Internal to comm.
class DirectReduce {
 public:
  // The backend's allreduce() with asyncOp false, of `count` contiguous
  // elements at `data` in host memory: in the caller, behind what is pending,
  // in the same order and with the same errors. Allocates nothing.
  virtual void all_reduce_direct(void* data, int64_t count,
                                 at::ScalarType dtype,
                                 c10d::ReduceOp::RedOpType op,
                                 std::chrono::milliseconds timeout) = 0;

 protected:
  // Owned as a backend.
  ~DirectReduce() = default;
};

}  // namespace lockstep
