#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/plain_peers/board.h"
#include "benchmarks/plain_peers/reducer.h"
#include "lockstep/comm/shm/protocol/group.h"

namespace lockstep::internal::bench {

// Calls shm::Group directly, on ordinary memory.
class ProtocolReducer : public Reducer {
 public:
  // Blocks until all ranks have met, for at most `timeout`. All other waits
  // have that time too, except the wait for a request.
  ProtocolReducer(Board& board, int rank, int size,
                  std::chrono::milliseconds timeout);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  nlohmann::json facts() const override;
  std::string refusal(size_t count, kernels::DType dtype,
                      kernels::ReduceOp op) const override;
  void* allocate(size_t bytes) override;
  void release(void* data) override;
  void all_reduce(void* data, size_t count, kernels::DType dtype,
                  kernels::ReduceOp op) override;
  int64_t greatest(int64_t number) override;
  std::string from_first(const std::string& text) override;
  std::vector<std::string> to_first(const std::string& text) override;

 protected:
  shm::Group& group() { return *group_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<shm::Group> group_;
};

}  // namespace lockstep::internal::bench
