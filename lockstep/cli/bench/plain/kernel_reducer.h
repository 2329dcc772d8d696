#pragma once

#include <cstddef>
#include <string>

#include "lockstep/base/shared_memory.h"
#include "lockstep/cli/bench/plain/protocol_reducer.h"

namespace lockstep::bench {

// The kernel alone: all ranks' data lie in one mapping, and each rank reduces
// its slice of all of them into all of them, as the protocol does it with
// registered memory, but waits for nobody. Results are right when all ranks
// have come back.
class KernelReducer : public ProtocolReducer {
 public:
  using ProtocolReducer::ProtocolReducer;

  nlohmann::json facts() const override { return nlohmann::json::object(); }
  void* allocate(size_t bytes) override;
  void release(void* data) override;
  void all_reduce(void* data, size_t count, kernels::DType dtype,
                  kernels::ReduceOp op) override;

 private:
  SharedMemory memory_;
  size_t stride_ = 0;  // from one rank's data to the next one's
};

}  // namespace lockstep::bench
