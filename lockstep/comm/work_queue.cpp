#include "lockstep/comm/work_queue.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/interruption.h"
#include "lockstep/base/no_destructor.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

// How much longer a wait lasts than its timeout, if the operation is due at the
// same time, so that the operation's own error comes first.
constexpr milliseconds kGrace{200};

[[noreturn]] void throw_timeout(const Deadline& deadline, const char* what) {
  throw c10::DistBackendError(
      c10::str(what, " timed out after ", deadline.elapsed().count(),
               " ms (allowed ", deadline.allowed().count(), " ms)"));
}

std::optional<CurrentCall> copied_call() {
  const auto* call = current_call();
  return call == nullptr ? std::nullopt : std::optional(*call);
}

// Tells the watcher, if any, of a wait.
class WaitScope {
 public:
  explicit WaitScope(WorkQueueWatcher* watcher) : watcher_(watcher) {
    if (watcher_) watcher_->caller_waits();
  }
  ~WaitScope() {
    if (watcher_) watcher_->caller_goes_on();
  }
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  WorkQueueWatcher* const watcher_;
};

class CompletedWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  int sourceRank() const override { return -1; }
  std::vector<at::Tensor> result() override { return {}; }
  void synchronize() override {}
  bool wait(milliseconds) override { return true; }
};

}  // namespace

class WorkQueue::QueuedWork final : public QueueWork {
 public:
  QueuedWork(int rank, c10d::OpType type, milliseconds timeout,
             std::vector<at::Tensor> results,
             const std::shared_ptr<State>& state);

  int sourceRank() const override { return -1; }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override { wait(::kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void at_end(std::function<void(bool failed)> function) override;
  bool wait(milliseconds timeout) override;
  // Returns whether a thread may run the operation in a wait until `deadline`,
  // or in one without: the operation is due before, and has no callbacks of the
  // user's, which may need a lock of the thread that waits.
  bool fits_wait(const std::optional<Deadline>& deadline) const {
    const std::lock_guard lock(mutex_);
    return !future_ && (!deadline || due_.remaining() <= deadline->remaining());
  }

  void end(const std::exception_ptr& failure) {
    end_waits(failure);
    end_future(failure);
  }
  // The two parts of end().
  void end_waits(const std::exception_ptr& failure) {
    if (watcher_) watcher_->ended();
    finish(failure);
  }
  void end_future(const std::exception_ptr& failure) {
    std::function<void(bool)> at_end;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard lock(mutex_);
      has_ended_ = true;
      at_end.swap(at_end_);
      future = future_;
    }
    if (at_end) at_end(failure != nullptr);
    if (future) complete(*future, failure);
  }

 private:
  // Not the owner: an operation that stands in line is owned by the state.
  const std::weak_ptr<State> state_;
  const std::shared_ptr<WorkQueueWatcher> watcher_;
  milliseconds timeout_;
  const Deadline due_;
  std::vector<at::Tensor> results_;
  // Guarded by mutex_ of Work, as what follows. Null until it is asked for.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::function<void(bool)> at_end_;
  bool has_ended_ = false;

  void complete(c10::ivalue::Future& future,
                const std::exception_ptr& failure) const;
};

class WorkQueue::State {
 public:
  State(std::string thread_name, std::shared_ptr<WorkQueueWatcher> watcher)
      : thread_name_(std::move(thread_name)), watcher_(std::move(watcher)) {}

  const std::shared_ptr<WorkQueueWatcher>& watcher() const { return watcher_; }
  static bool on_a_thread() { return queue_of_this_thread != nullptr; }
  bool is_own_thread() const { return queue_of_this_thread == this; }

  // Returns what is left of `timeout`, without a look at the clock if the turn
  // was free.
  milliseconds take_turn(milliseconds timeout) {
    auto expected = kIdle;
    // Acquire pairs with the releases in leave_turn() and grant_next(): an
    // operation sees what those before it have written.
    if (turn_.compare_exchange_strong(expected, kTaken,
                                      std::memory_order_acquire)) {
      return timeout;
    }
    const auto deadline = Deadline::after(timeout);
    stand_in_line(deadline);
    return std::max(deadline.remaining(), milliseconds(1));
  }

  void leave_turn() {
    auto expected = kTaken;
    if (turn_.compare_exchange_strong(expected, kIdle,
                                      std::memory_order_release)) {
      return;
    }
    std::lock_guard lock(mutex_);
    grant_next();
  }

  static void enqueue(const std::shared_ptr<State>& self,
                      const c10::intrusive_ptr<QueuedWork>& work,
                      std::function<void()> operation) {
    std::exception_ptr reason;
    bool begins = false;
    {
      std::lock_guard lock(self->mutex_);
      reason = self->closed_;
      if (self->watcher_) self->watcher_->queued();
      if (!reason) {
        if (self->threads_.empty()) self->add_thread(self);
        Item item{.work = work,
                  .operation = std::move(operation),
                  .thread_state = {},
                  .call = copied_call()};
        begins = self->claim_or_announce();
        if (begins) {
          self->granted_ = std::move(item);
        } else {
          self->line_.push_back({.caller = nullptr, .item = std::move(item)});
        }
        // A callback may wait for the future of what it starts.
        if (self->is_own_thread() && self->idle_ == 0) self->add_thread(self);
      }
    }
    // Without the lock, which the thread would want at once.
    if (begins) self->thread_wakes_.notify_all();
    if (reason) work->end(reason);
  }

  void close(const std::exception_ptr& reason,
             const std::function<void()>& tell) {
    std::deque<Place> unbegun;
    {
      std::lock_guard lock(mutex_);
      if (!closed_) {
        closed_ = reason;
        claim_or_announce();
        unbegun.swap(line_);
      }
      for (auto& place : unbegun) {
        if (place.caller) place.caller->wake->notify_one();
      }
      if (granted_) {
        unbegun.push_front({.caller = nullptr, .item = std::move(granted_)});
        granted_.reset();
      }
      thread_wakes_.notify_all();  // one may be in run_pending_until()
    }
    if (tell) tell();
    // End all waits first, because a callback may wait for another work.
    for (auto& place : unbegun) {
      if (place.item) place.item->work->end_waits(reason);
    }
    for (auto& place : unbegun) {
      if (place.item) place.item->work->end_future(reason);
    }
  }

  // Runs what is pending, in a thread that waits for `work` until the deadline.
  // In a callback of a future, on a thread of the queue, where maybe only this
  // thread can run it, returns when `work` has ended, the deadline is over or
  // the queue is closed; elsewhere, when the next operation has begun on
  // another thread or does not fit.
  void run_pending_until(QueuedWork& work,
                         const std::optional<Deadline>& deadline) {
    std::unique_lock lock(mutex_);
    if (!is_own_thread()) {
      while (granted_ && granted_->work->fits_wait(deadline) &&
             !work.isCompleted()) {
        execute_granted(lock);
      }
      return;
    }
    while (!work.isCompleted() && !closed_) {
      if (granted_) {
        execute_granted(lock);
      } else if (!deadline) {
        thread_wakes_.wait(lock);
      } else if (deadline->expired()) {
        return;
      } else {
        thread_wakes_.wait_for(lock, bounded_timeout(deadline->remaining()));
      }
    }
  }

  void finish() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    if (is_own_thread()) {
      while (granted_) execute_granted(lock);
    }
    thread_wakes_.notify_all();
    auto threads = std::move(threads_);
    threads_.clear();
    lock.unlock();
    for (auto& thread : threads) {
      if (is_own_thread()) {
        // A thread cannot join itself, and another one may be in a callback
        // that waits for this one. Each leaves its loop after this, and keeps
        // this state alive until then.
        thread.detach();
      } else {
        thread.join();
      }
    }
    // An operation that a waiting thread runs may use the queue's owner.
    lock.lock();
    waiters_end_.wait(lock, [this] { return running_waiters_ == 0; });
  }

 private:
  // Something stands in line, or the queue is closed, only in kContended. A
  // thread that changes to or from kContended holds the mutex.
  enum TurnState : int { kIdle, kTaken, kContended };

  struct Item {
    c10::intrusive_ptr<QueuedWork> work;
    std::function<void()> operation;
    at::ThreadLocalState thread_state;  // made in the caller
    std::optional<CurrentCall> call;    // copied there
  };
  struct Caller {
    std::condition_variable* wake;
    bool granted;
  };
  struct Place {
    Caller* caller;  // on that caller's stack; null for an item
    std::optional<Item> item;
  };

  // Enters kContended. Returns true if the turn was free and is the caller's
  // now.
  bool claim_or_announce() {
    for (auto seen = turn_.load(std::memory_order_relaxed);
         seen != kContended;) {
      // Acquire pairs as in take_turn().
      if (turn_.compare_exchange_weak(seen, kContended,
                                      std::memory_order_acquire)) {
        return seen == kIdle;
      }
    }
    return false;
  }

  // Called by the thread that has the turn. The turn passes to the first in
  // line without a moment in which another thread could take it.
  void grant_next() {
    if (closed_) return;  // no thread gets it any more
    if (line_.empty()) {
      turn_.store(kIdle, std::memory_order_release);
      return;
    }
    auto next = std::move(line_.front());
    line_.pop_front();
    if (next.caller) {
      next.caller->granted = true;
      next.caller->wake->notify_all();
    } else {
      granted_ = std::move(next.item);
      thread_wakes_.notify_all();
    }
  }

  void stand_in_line(const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    if (!closed_ && claim_or_announce()) return;
    // In a callback of a future: pending operations can maybe run only here.
    const bool on_thread = is_own_thread();
    const WaitScope scope(on_thread ? nullptr : watcher_.get());
    std::condition_variable own;
    Caller caller{.wake = on_thread ? &thread_wakes_ : &own, .granted = false};
    if (!closed_) line_.push_back({.caller = &caller, .item = std::nullopt});
    while (!caller.granted) {
      if (closed_) std::rethrow_exception(closed_);
      if (on_thread && granted_) {
        execute_granted(lock);
      } else if (deadline.expired()) {
        leave_line(caller);
        throw_timeout(deadline, "the wait for earlier operations");
      } else {
        caller.wake->wait_for(lock, std::min(milliseconds(kInterruptionSliceMs),
                                             deadline.remaining()));
        lock.unlock();
        std::exception_ptr interruption;
        try {
          check_interruption();
        } catch (...) {
          interruption = std::current_exception();
        }
        lock.lock();
        if (interruption) {
          if (caller.granted) {
            grant_next();
          } else {
            leave_line(caller);
          }
          std::rethrow_exception(interruption);
        }
      }
    }
  }

  void leave_line(const Caller& caller) {
    std::erase_if(line_, [&](const Place& p) { return p.caller == &caller; });
  }

  void add_thread(const std::shared_ptr<State>& self) {
    threads_.emplace_back([self] {
      ::pthread_setname_np(::pthread_self(),
                           self->thread_name_.substr(0, 15).c_str());
      queue_of_this_thread = self.get();
      self->loop();
    });
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      thread_wakes_.wait(
          lock, [this] { return granted_ || (stopping_ && line_.empty()); });
      --idle_;
      if (!granted_) return;
      execute_granted(lock);
    }
  }

  void execute_granted(std::unique_lock<std::mutex>& lock) {
    auto item = std::move(granted_);
    granted_.reset();
    const bool waits = !is_own_thread();
    if (waits) ++running_waiters_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      const at::ThreadLocalStateGuard state(item->thread_state);
      const c10::NoGradGuard no_grad;
      const CurrentCallScope call(item->call ? &*item->call : nullptr);
      const Span span("comm_thread", item->call && item->call->operation
                                         ? item->call->operation
                                         : "operation");
      item->operation();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (waits && --running_waiters_ == 0) waiters_end_.notify_all();
    grant_next();
    lock.unlock();
    // End the work after leaving the turn, because callbacks may use the queue,
    // and without the lock, because the operation may own the owner of the
    // queue.
    item->work->end(failure);
    item.reset();
    lock.lock();
    // A thread in a callback may be in run_pending_until() for this work.
    if (idle_ < static_cast<int>(threads_.size())) thread_wakes_.notify_all();
  }

  const std::string thread_name_;
  const std::shared_ptr<WorkQueueWatcher> watcher_;
  std::atomic<TurnState> turn_{kIdle};
  std::mutex mutex_;
  std::condition_variable thread_wakes_;
  std::deque<Place> line_;
  std::optional<Item> granted_;  // has the turn; the thread runs it
  std::exception_ptr closed_;
  bool stopping_ = false;
  // The first runs the operations. More come if callbacks start operations: one
  // that waits for the future of such an operation does not tell the queue.
  std::vector<std::thread> threads_;
  int idle_ = 0;  // how many of them wait for an operation
  // How many other threads run an operation in their wait.
  int running_waiters_ = 0;
  std::condition_variable waiters_end_;

  static thread_local const State* queue_of_this_thread;
};

thread_local const WorkQueue::State* WorkQueue::State::queue_of_this_thread =
    nullptr;

WorkQueue::QueuedWork::QueuedWork(int rank, c10d::OpType type,
                                  milliseconds timeout,
                                  std::vector<at::Tensor> results,
                                  const std::shared_ptr<State>& state)
    : QueueWork(rank, type),
      state_(state),
      watcher_(state->watcher()),
      timeout_(timeout),
      due_(Deadline::after(timeout)),
      results_(std::move(results)) {}

c10::intrusive_ptr<c10::ivalue::Future> WorkQueue::QueuedWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  if (has_ended_) complete(*future_, exception_);
  return future_;
}

void WorkQueue::QueuedWork::at_end(std::function<void(bool failed)> function) {
  {
    const std::lock_guard lock(mutex_);
    if (!has_ended_) {
      at_end_ = std::move(function);
      return;
    }
  }
  function(exception_ != nullptr);
}

void WorkQueue::QueuedWork::complete(c10::ivalue::Future& future,
                                     const std::exception_ptr& failure) const {
  try {
    if (failure) {
      future.setError(failure);
    } else {
      future.markCompleted(results_);
    }
  } catch (...) {
    // A callback of the future has thrown. No caller waits here for its
    // exception.
  }
}

bool WorkQueue::QueuedWork::wait(milliseconds timeout) {
  timeout = bounded_timeout(timeout);
  std::optional<Deadline> deadline;
  if (timeout != ::kNoTimeout) {
    deadline = Deadline::after(timeout +
                               (timeout < timeout_ ? milliseconds(0) : kGrace));
  }
  const auto state = isCompleted() ? nullptr : state_.lock();
  const WaitScope scope(!state || state->is_own_thread() ||
                                (deadline && 10 * timeout < 9 * timeout_)
                            ? nullptr
                            : watcher_.get());
  if (state) state->run_pending_until(*this, deadline);
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return completed_; };
  const milliseconds slice(kInterruptionSliceMs);
  while (!cv_.wait_for(
      lock, deadline ? std::min(slice, deadline->remaining()) : slice, ended)) {
    if (deadline && deadline->expired()) throw_timeout(*deadline, "the wait");
    lock.unlock();
    check_interruption();
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

WorkQueue::Turn::Turn(State& state, milliseconds timeout)
    : state_(state), left_(state.take_turn(timeout)) {}
WorkQueue::Turn::~Turn() { state_.leave_turn(); }

WorkQueue::WorkQueue(std::string thread_name,
                     std::shared_ptr<WorkQueueWatcher> watcher)
    : state_(std::make_shared<State>(std::move(thread_name),
                                     std::move(watcher))) {}

WorkQueue::~WorkQueue() { state_->finish(); }

bool WorkQueue::on_own_thread() { return State::on_a_thread(); }

c10::intrusive_ptr<QueueWork> WorkQueue::enqueue(
    int rank, c10d::OpType type, milliseconds timeout,
    std::vector<at::Tensor> results, std::function<void()> operation) {
  auto work = c10::make_intrusive<QueuedWork>(rank, type, timeout,
                                              std::move(results), state_);
  State::enqueue(state_, work, std::move(operation));
  return work;
}

void WorkQueue::close(const std::exception_ptr& reason,
                      const std::function<void()>& tell) {
  // Keep the state: an operation that is dropped here may own the queue.
  const auto state = state_;
  state->close(reason, tell);
}

const c10::intrusive_ptr<c10d::Work>& completed_work() {
  // Never destroyed, as LibTorch's statics may be destroyed before it.
  static NoDestructor<c10::intrusive_ptr<c10d::Work>> work(
      c10::make_intrusive<CompletedWork>());
  return *work;
}

}  // namespace lockstep::internal
