#pragma once

// The streams of all simulated devices. Each stream is a queue with a thread,
// which starts with the first task. A thread *holds back* the task at the head
// of its queue if the seed says so, until the host waits for it (the task is
// *demanded*, directly or by a stream that waits for it), until too many tasks
// are queued, or until nobody has waited for a few milliseconds.
// A stream that is not eager also lets others pass: where another stream waits
// for its task, it pauses after that task.
//
// One mutex guards everything. Tasks run without it.

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::internal::simulated_cuda {

struct StreamQueue;

// A moment in the life of a stream: when it has run its first `number` tasks.
struct StreamPoint {
  StreamQueue* queue = nullptr;
  uint64_t number = 0;
};

class Scheduler {
 public:
  // The one of this process, which is never destroyed. Throws c10::Error if the
  // process was forked after its parent had used the scheduler.
  static Scheduler& get();

  // Adds a task to a stream and returns the point after it.
  StreamPoint enqueue(const c10::Stream& stream, std::function<void()> task);
  // Makes `stream` wait for `point`.
  void enqueue_wait(const c10::Stream& stream, const StreamPoint& point);
  // The point after all that `stream` has been given.
  StreamPoint end_of(const c10::Stream& stream);
  bool has_reached(const StreamPoint& point);

  // These block the caller, and then throw the error of a task of the device.
  void wait_for(const StreamPoint& point);
  void wait_for_device(c10::DeviceIndex device);

  // Draws delays anew. No task may be queued.
  void set_seed(uint64_t seed);

  int64_t tasks_run() const { return tasks_run_; }
  int64_t host_waits() const { return host_waits_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  Scheduler();
  StreamQueue& queue_of(const c10::Stream& stream);
  StreamPoint push(const c10::Stream& stream, std::function<void()> task,
                   std::optional<StreamPoint> awaited);
  void run_queue(StreamQueue& queue);
  void hold_back(StreamQueue& queue, Lock& lock);
  void let_others_pass(StreamQueue& queue, Lock& lock);
  void demand(const StreamPoint& point);
  void await(const StreamPoint& point, Lock& lock);
  void throw_error_of(c10::DeviceIndex device);
  void stop();

  std::mutex mutex_;
  std::condition_variable progress_;  // a task has ended
  int awaiting_ = 0;                  // threads that wait for progress_
  int running_ = 0;                   // tasks that run now
  bool stopped_ = false;              // the process exits
  uint64_t seed_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>,
           std::unique_ptr<StreamQueue>>
      queues_;
  std::map<c10::DeviceIndex, std::exception_ptr> errors_;
  std::atomic<int64_t> tasks_run_{0};
  std::atomic<int64_t> host_waits_{0};
};

}  // namespace lockstep::internal::simulated_cuda
