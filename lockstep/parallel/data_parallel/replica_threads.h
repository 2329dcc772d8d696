#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep::internal {

// Returns whether this thread runs the forward of a CPU replica beside those of
// other CPU replicas, which draw from the same default generator.
bool runs_beside_replicas();

// Permanent threads, one for each replica of a DataParallel, so that each can
// have its own number of intra-op threads: LibTorch keeps that number by
// thread, and other threads would notice if the caller's number changed in
// every step.
class ReplicaThreads {
 public:
  // `intra_op_threads`: at::get_num_threads() in the thread of a CPU device; 0
  // means the caller's number divided by the number of CPU devices, at least 1.
  // Threads of other devices keep LibTorch's number.
  ReplicaThreads(std::vector<at::Device> devices, int64_t intra_op_threads);
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;
  ~ReplicaThreads();

  // Runs task(0) ... task(count - 1), each in its own thread, on its device and
  // on the caller's stream of that device, with the caller's thread-local state
  // (grad mode, inference mode, autocast). Blocks until all tasks have ended.
  //
  // If tasks threw, rethrows the exception of the lowest task that did, as
  // Python does, with "Caught TYPE in replica 1 on device cuda:1." added to its
  // message. Errors of c10 and of the standard library keep their type; others
  // become a std::runtime_error in which the original is nested
  // (std::rethrow_if_nested).
  //
  // One caller at a time.
  void run(size_t count, const std::function<void(size_t)>& task);

 private:
  class Thread;
  std::vector<at::Device> devices_;
  std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace lockstep::internal
