#pragma once

#include <cstddef>
#include <string>

#include "benchmarks/plain_peers/protocol_reducer.h"
#include "lockstep/base/shared_memory.h"

namespace lockstep::internal::bench {

// The kernel alone, without synchronisation. The data of all ranks lie in one
// mapping. Each rank reduces its slice of all of them into all of them, as the
// protocol does with registered memory, but waits for no other rank. So results
// are right once all ranks have returned.
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

}  // namespace lockstep::internal::bench
