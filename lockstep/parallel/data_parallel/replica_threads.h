#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

// Threads that stay, one for each replica of a DataParallel, so that each can
// have its own number of intra-op threads: LibTorch keeps that by thread, and
// changing the caller's in every step would be felt by other threads.
class ReplicaThreads {
 public:
  // `intra_op_threads`: at::get_num_threads() within a CPU device's thread; 0:
  // the caller's divided by the number of CPU devices, at least 1. Threads of
  // other devices keep LibTorch's.
  ReplicaThreads(std::vector<at::Device> devices, int64_t intra_op_threads);
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;
  ~ReplicaThreads();

  // Runs task(0) ... task(count - 1), each in its thread, on its device and on
  // the caller's stream of that device, with the caller's thread-local state
  // (grad mode, inference mode, autocast). Blocks until all have ended.
  //
  // If some threw, throws what the first of them in their order did, as Python
  // does: the same exception with "Caught TYPE in replica 1 on device cuda:1."
  // in its message. c10's errors and the standard library's keep their type;
  // others become a std::runtime_error that has the original nested in it
  // (std::rethrow_if_nested).
  //
  // One caller at a time.
  void run(size_t count, const std::function<void(size_t)>& task);

 private:
  class Thread;
  std::vector<at::Device> devices_;
  std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace lockstep
