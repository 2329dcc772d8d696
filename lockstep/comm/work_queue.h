#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

// How a backend whose operations block its caller (shared memory, MPI, the
// hierarchy of both) gives c10d's asynchronous ones. Internal to comm.
namespace lockstep {

// Is told what is pending, and when a caller waits for that. From any thread;
// throws nothing.
class WorkQueueWatcher {
 public:
  virtual ~WorkQueueWatcher() = default;
  virtual void queued() = 0;
  virtual void ended() = 0;  // once for each that was queued
  // A caller blocks until pending operations have ended (not if it gives up
  // earlier than they do), and no longer does.
  virtual void caller_waits() = 0;
  virtual void caller_goes_on() = 0;
};

// Runs the collectives of one group one after the other, in the order in which
// they were issued: synchronous ones in their caller, behind those that are
// pending; asynchronous ones on one thread, which the first of them starts.
//
// Threads: any, but the order in which threads issue is the order of the
// group's operations, and must be the same on all ranks. An operation may
// close() its queue, but not run() another in it; a callback of a work's future
// may do both.
class WorkQueue {
 public:
  // `thread_name`: at most 15 characters, as the system shows it.
  explicit WorkQueue(std::string thread_name,
                     std::shared_ptr<WorkQueueWatcher> watcher = nullptr);
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;
  // Waits for what is pending; after close(), for what runs. On the queue's own
  // thread (an operation or a callback held the last reference to the owner) it
  // runs what is pending itself. Not while another thread is in run().
  ~WorkQueue();

  // Runs `operation` in the caller, whose exceptions pass through. With
  // something pending waits for its end first, for `timeout` (more than 0) at
  // most: throws c10::DistBackendError then, and `operation` was not run.
  // Throws the reason after close(). Where nothing is pending it costs two
  // atomic operations and no allocation.
  template <typename Operation>
  void run(std::chrono::milliseconds timeout, Operation&& operation) {
    Turn turn(*state_, timeout);
    std::forward<Operation>(operation)();
  }

  // Queues `operation`, which runs without autograd and otherwise with the
  // thread-local state of the caller (its CurrentCall too); what it throws
  // comes out of the work's wait(). It must end by itself `timeout` after this
  // call at the latest.
  //
  // The work: wait() blocks for the time that it is given (none: to the end)
  // and throws c10::DistBackendError when that is over; it may be repeated.
  // Where that time is no shorter than `timeout` it stays a little longer, so
  // that the operation's own error, which knows more, comes first. sourceRank()
  // is -1. `results` (CPU tensors): what result() and the future give.
  c10::intrusive_ptr<c10d::Work> enqueue(int rank, c10d::OpType type,
                                         std::chrono::milliseconds timeout,
                                         std::vector<at::Tensor> results,
                                         std::function<void()> operation);

  // What was not begun ends with `reason` as its error, and so does what is
  // enqueued or run from now on. What runs is not waited for: the backend makes
  // it end. The first reason stays.
  void close(std::exception_ptr reason);

 private:
  class State;
  class QueuedWork;
  // The caller's place in the order.
  class Turn {
   public:
    Turn(State& state, std::chrono::milliseconds timeout);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    State& state_;
  };

  std::shared_ptr<State> state_;  // the thread's too
};

// The work of an operation that has ended well: what synchronous calls return.
// One object for all of them (no future, no results), as its making would cost
// more than a small collective.
const c10::intrusive_ptr<c10d::Work>& completed_work();

}  // namespace lockstep
