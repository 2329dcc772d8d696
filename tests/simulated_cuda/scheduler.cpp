#include "tests/simulated_cuda/scheduler.h"

#include <c10/util/Exception.h>
#include <c10/util/ParallelGuard.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "tests/simulated_cuda/settings.h"

namespace lockstep::internal::simulated_cuda {
namespace {

// How long a task is held back if nobody waits for it, so that a host that only
// asks whether an event has been reached gets its answer at last.
constexpr std::chrono::milliseconds kPatience(3);

// The longest pause in which other streams may pass.
constexpr std::chrono::milliseconds kPause(1);

// CUDA, too, accepts some thousand launches before it runs the first.
constexpr uint64_t kMostQueued = 2000;

bool forked = false;

enum class Manner { kEager, kHesitant, kIdle };

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

}  // namespace

struct Task {
  std::function<void()> run;
  std::optional<StreamPoint> awaited;  // if set, the task is this wait
};

struct StreamQueue {
  c10::DeviceIndex device;
  c10::StreamId id;
  std::deque<Task> tasks;
  uint64_t enqueued = 0;
  uint64_t completed = 0;
  uint64_t demanded = 0;   // tasks up to this number run at once
  uint64_t restarted = 0;  // the task after which the present seed began
  uint64_t draw = 0;       // of the present seed for this stream
  bool has_thread = false;
  std::optional<StreamPoint> blocked_by;
  std::condition_variable woken;  // a task was added or demanded

  bool reached(uint64_t number) const { return completed >= number; }
  void draw_anew(uint64_t seed) {
    restarted = enqueued;
    draw = seed == 0
               ? 0
               : mixed(seed ^ mixed(static_cast<uint64_t>(device) * 1000003U +
                                    static_cast<uint64_t>(id) + 1U)) |
                     1U;
  }
  Manner manner() const {
    if (draw == 0) return Manner::kEager;
    return static_cast<Manner>((draw >> 8U) % 3U);
  }
  bool holds_back(uint64_t task) const {
    if (manner() != Manner::kHesitant) return manner() == Manner::kIdle;
    // One task in four is held back, and with it those after it.
    return mixed(draw + (task - restarted)) % 4U == 0;
  }
};

Scheduler& Scheduler::get() {
  static auto* const scheduler = new Scheduler;
  TORCH_CHECK(!forked, "Cannot re-initialize ", kDeviceType,
              " in forked subprocess. (The parent used "
              "the simulated device before fork().)");
  return *scheduler;
}

Scheduler::Scheduler() : seed_(initial_seed()) {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  std::atexit([] {
    if (!forked) get().stop();
  });
}

void Scheduler::stop() {
  Lock lock(mutex_);
  stopped_ = true;
  // A task of a collective may never end, so this wait has a limit.
  ++awaiting_;
  progress_.wait_for(lock, std::chrono::seconds(1),
                     [&] { return running_ == 0; });
  --awaiting_;
}

StreamQueue& Scheduler::queue_of(const c10::Stream& stream) {
  auto& queue = queues_[{stream.device_index(), stream.id()}];
  if (!queue) {
    queue = std::make_unique<StreamQueue>();
    queue->device = stream.device_index();
    queue->id = stream.id();
    queue->draw_anew(seed_);
  }
  return *queue;
}

StreamPoint Scheduler::push(const c10::Stream& stream,
                            std::function<void()> task,
                            std::optional<StreamPoint> awaited) {
  const Lock lock(mutex_);
  StreamQueue& queue = queue_of(stream);
  queue.tasks.push_back({std::move(task), awaited});
  ++queue.enqueued;
  if (!queue.has_thread) {
    queue.has_thread = true;
    std::thread(&Scheduler::run_queue, this, std::ref(queue)).detach();
  }
  if (queue.tasks.size() > kMostQueued) {
    demand({&queue, queue.enqueued - kMostQueued / 2});
  }
  queue.woken.notify_one();
  return {&queue, queue.enqueued};
}

StreamPoint Scheduler::enqueue(const c10::Stream& stream,
                               std::function<void()> task) {
  return push(stream, std::move(task), {});
}

void Scheduler::enqueue_wait(const c10::Stream& stream,
                             const StreamPoint& point) {
  push(stream, {}, point);
}

StreamPoint Scheduler::end_of(const c10::Stream& stream) {
  const Lock lock(mutex_);
  StreamQueue& queue = queue_of(stream);
  return {&queue, queue.enqueued};
}

bool Scheduler::has_reached(const StreamPoint& point) {
  const Lock lock(mutex_);
  return point.queue->reached(point.number);
}

void Scheduler::demand(const StreamPoint& point) {
  StreamQueue& queue = *point.queue;
  if (queue.demanded >= point.number) return;
  queue.demanded = point.number;
  queue.woken.notify_one();
  if (queue.blocked_by) demand(*queue.blocked_by);
}

void Scheduler::await(const StreamPoint& point, Lock& lock) {
  ++awaiting_;
  progress_.wait(lock, [&] { return point.queue->reached(point.number); });
  --awaiting_;
}

void Scheduler::wait_for(const StreamPoint& point) {
  Lock lock(mutex_);
  ++host_waits_;
  demand(point);
  await(point, lock);
  throw_error_of(point.queue->device);
}

void Scheduler::wait_for_device(c10::DeviceIndex device) {
  Lock lock(mutex_);
  ++host_waits_;
  std::vector<StreamPoint> ends;
  for (const auto& [key, queue] : queues_) {
    if (key.first == device) ends.push_back({queue.get(), queue->enqueued});
  }
  for (const StreamPoint& end : ends) demand(end);
  for (const StreamPoint& end : ends) await(end, lock);
  throw_error_of(device);
}

void Scheduler::throw_error_of(c10::DeviceIndex device) {
  const auto found = errors_.find(device);
  if (found == errors_.end()) return;
  const std::exception_ptr error = found->second;
  errors_.erase(found);
  std::rethrow_exception(error);
}

void Scheduler::set_seed(uint64_t seed) {
  const Lock lock(mutex_);
  seed_ = seed;
  for (const auto& [key, queue] : queues_) queue->draw_anew(seed);
}

void Scheduler::hold_back(StreamQueue& queue, Lock& lock) {
  const uint64_t task = queue.completed + 1;
  if (queue.demanded >= task || !queue.holds_back(task)) return;
  const auto patience_ends = std::chrono::steady_clock::now() + kPatience;
  while (queue.demanded < task) {
    if (queue.woken.wait_until(lock, patience_ends) ==
        std::cv_status::timeout) {
      queue.demanded = std::max(queue.demanded, queue.enqueued);
    }
  }
}

void Scheduler::let_others_pass(StreamQueue& queue, Lock& lock) {
  if (queue.manner() == Manner::kEager) return;
  std::vector<const StreamQueue*> others;
  for (const auto& [key, other] : queues_) {
    if (other->blocked_by && other->blocked_by->queue == &queue &&
        other->blocked_by->number == queue.completed) {
      others.push_back(other.get());
    }
  }
  if (others.empty()) return;
  ++awaiting_;
  progress_.wait_for(lock, kPause, [&] {
    return std::all_of(others.begin(), others.end(), [](const auto* other) {
      return other->completed == other->enqueued;
    });
  });
  --awaiting_;
}

void Scheduler::run_queue(StreamQueue& queue) {
  pthread_setname_np(pthread_self(), "simulated_cuda");
  // The kernels of streams do not start threads of their own.
  const c10::ParallelGuard no_threads(true);
  Lock lock(mutex_);
  for (;;) {
    queue.woken.wait(lock, [&] { return !queue.tasks.empty(); });
    hold_back(queue, lock);
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    if (task.awaited) {
      queue.blocked_by = task.awaited;
      if (queue.demanded > queue.completed) demand(*task.awaited);
      await(*task.awaited, lock);
      queue.blocked_by.reset();
    } else if (!stopped_) {
      ++running_;
      lock.unlock();
      std::exception_ptr error;
      try {
        task.run();
      } catch (...) {
        error = std::current_exception();
      }
      task.run = {};  // destroys what it holds before the task counts as done
      ++tasks_run_;
      lock.lock();
      --running_;
      if (error) errors_.try_emplace(queue.device, error);
    }
    ++queue.completed;
    if (awaiting_ > 0) progress_.notify_all();
    let_others_pass(queue, lock);
  }
}

}  // namespace lockstep::internal::simulated_cuda
