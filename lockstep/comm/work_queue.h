#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <concepts>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

// Gives backends whose operations block their caller (shared memory, MPI,
// hybrid) the asynchronous operations of c10d. Internal to comm.
namespace lockstep::internal {

// Is told which operations are pending, and when a caller waits for them. Its
// functions are called from any thread; they throw nothing.
class WorkQueueWatcher {
 public:
  virtual ~WorkQueueWatcher() = default;
  virtual void queued() = 0;
  virtual void ended() = 0;  // once for each that was queued
  // A caller begins to block until pending operations have ended, and has
  // ceased to. A caller that gives up earlier than they do is not reported.
  virtual void caller_waits() = 0;
  virtual void caller_goes_on() = 0;
};

// The work of an operation that a WorkQueue runs.
class QueueWork : public c10d::Work {
 public:
  using Work::Work;
  // Calls `function` when the operation has ended, in the thread that ran it,
  // or here if it has ended already. `function` must be quick and must not
  // throw. A work has one such function. Unlike a callback of the future, it
  // does not keep wait() from running the operation.
  virtual void at_end(std::function<void(bool failed)> function) = 0;
};

// Runs the collectives of one group one after the other, in the order in which
// they were issued: synchronous ones in their caller, after those that are
// pending; asynchronous ones on one thread, which the first of them starts. If
// a caller waits for one that this thread has not begun, the caller runs it
// itself, which saves the way to the thread and back.
//
// Threads: any may call, but the order in which threads issue is the order of
// the group's operations, and must be the same on all ranks. An operation may
// close() its queue, but not run() another in it; a callback of a work's future
// may do both. Such a callback runs on a thread of the queue, because wait()
// runs no operation whose future somebody has (if it is asked for while wait()
// runs the operation, its callbacks run in wait()): if a callback waits for a
// work, wait() itself runs the operations that are pending before. If it starts
// an operation, the queue gets another thread, so that it can wait for the
// future of that operation, too. It must not wait for the future of an
// operation that was started before and has not ended, because nothing would
// run that operation then.
class WorkQueue {
 public:
  // `thread_name`: at most 15 characters, as the system shows it.
  explicit WorkQueue(std::string thread_name,
                     std::shared_ptr<WorkQueueWatcher> watcher = nullptr);
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;
  // Waits for pending operations; after close(), only for one that runs. If it
  // is called on the queue's own thread (because an operation or a callback
  // held the last reference to the owner), it runs the pending operations
  // itself. No other thread may be in run() meanwhile.
  ~WorkQueue();

  // Runs `operation` in the caller, and its exceptions pass through. If
  // operations are pending, waits for their end first, for `timeout` (more than
  // 0) at most; when that is over, throws c10::DistBackendError, and
  // `operation` was not run. After close() throws the reason. `operation` may
  // take an argument: what is left of `timeout`, at least 1 ms. If nothing is
  // pending, the queue costs two atomic operations and no allocation.
  template <typename Operation>
  void run(std::chrono::milliseconds timeout, Operation&& operation) {
    const Turn turn(*state_, timeout);
    if constexpr (std::invocable<Operation, std::chrono::milliseconds>) {
      std::forward<Operation>(operation)(turn.left());
    } else {
      std::forward<Operation>(operation)();
    }
  }

  // Queues `operation`, which runs without autograd and otherwise with the
  // thread-local state of the caller (its CurrentCall too). The work's wait()
  // throws what `operation` throws. `operation` must end by itself `timeout`
  // after this call at the latest.
  //
  // The work: wait() blocks for the time that it is given (none means to the
  // end) and throws c10::DistBackendError when that is over; it may be
  // repeated. If that time is not shorter than `timeout`, wait() blocks a
  // little longer, so that the operation's own error, which knows more, comes
  // first. sourceRank() is -1. `results` (CPU tensors) are what result() and
  // the future give. wait() itself runs pending operations up to this one, as
  // long as no thread has begun the next of them and it is due before the wait
  // is. If the wait is interrupted meanwhile (base/interruption.h), that
  // operation fails.
  c10::intrusive_ptr<QueueWork> enqueue(int rank, c10d::OpType type,
                                        std::chrono::milliseconds timeout,
                                        std::vector<at::Tensor> results,
                                        std::function<void()> operation);

  // Returns whether the operation that this thread runs was queued and runs
  // beside its caller.
  static bool on_own_thread();

  // Ends operations that were not begun with `reason` as their error, and
  // likewise those that are enqueued or run from now on. Does not wait for one
  // that runs: the backend makes it end. The first reason stays. Calls `tell`,
  // which must not throw, before the first operation ends: the callbacks of
  // their futures run in this call and may take long.
  void close(const std::exception_ptr& reason,
             const std::function<void()>& tell = {});

 private:
  class State;
  class QueuedWork;
  // Takes the caller's turn in the order of operations, and leaves it at the
  // end.
  class Turn {
   public:
    Turn(State& state, std::chrono::milliseconds timeout);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    std::chrono::milliseconds left() const { return left_; }

   private:
    State& state_;
    const std::chrono::milliseconds left_;
  };

  std::shared_ptr<State> state_;  // shared with the thread
};

// Returns the work of an operation that has ended well, for synchronous calls.
// It is one object for all of them (no future, no results), because making one
// would cost more than a small collective.
const c10::intrusive_ptr<c10d::Work>& completed_work();

}  // namespace lockstep::internal
