#include "lockstep/parallel/data_parallel/replica_threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <typeinfo>
#include <utility>

#include "lockstep/comm/accelerator.h"

namespace lockstep::internal {
namespace {

thread_local bool beside_replicas = false;

// Throws `message` as a T if `error` is exactly a T. A class derived from T
// does not count: its other members would be lost.
template <typename T>
void throw_same(const std::exception& error, const std::string& message) {
  if (typeid(error) == typeid(T)) throw T(message);
}

[[noreturn]] void rethrow_of_replica(const std::exception_ptr& thrown,
                                     size_t replica, const at::Device& device) {
  const auto caught = [&](const std::string& type) {
    return "Caught " + type + " in replica " + std::to_string(replica) +
           " on device " + device.str() + ".";
  };
  try {
    std::rethrow_exception(thrown);
  } catch (c10::Error& error) {
    error.add_context(caught(c10::demangle(typeid(error).name())));
    throw;
  } catch (const std::exception& error) {
    const auto message = caught(c10::demangle(typeid(error).name())) +
                         "\nOriginal message: " + error.what();
    throw_same<std::runtime_error>(error, message);
    throw_same<std::range_error>(error, message);
    throw_same<std::overflow_error>(error, message);
    throw_same<std::underflow_error>(error, message);
    throw_same<std::logic_error>(error, message);
    throw_same<std::invalid_argument>(error, message);
    throw_same<std::out_of_range>(error, message);
    throw_same<std::domain_error>(error, message);
    throw_same<std::length_error>(error, message);
    std::throw_with_nested(std::runtime_error(message));
  } catch (...) {
    std::throw_with_nested(std::runtime_error(
        caught("an exception that is not a std::exception")));
  }
}

}  // namespace

bool runs_beside_replicas() { return beside_replicas; }

class ReplicaThreads::Thread {
 public:
  explicit Thread(size_t number) : thread_([this] { loop(); }) {
    const auto name = "replica_" + std::to_string(number);
    ::pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  ~Thread() {
    start({});
    thread_.join();
  }

  // An empty task ends the thread.
  void start(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      task_ = std::move(task);
      busy_ = true;
    }
    changed_.notify_one();
  }
  // Waits until the task has ended, and returns the exception that it threw.
  std::exception_ptr wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
    return std::exchange(thrown_, nullptr);
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return busy_; });
      auto task = std::exchange(task_, {});
      if (!task) return;
      lock.unlock();
      std::exception_ptr thrown;
      try {
        task();
      } catch (...) {
        thrown = std::current_exception();
      }
      // The objects that the task holds must be destroyed before the caller
      // goes on.
      task = {};
      lock.lock();
      thrown_ = std::move(thrown);
      busy_ = false;
      changed_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;
  bool busy_ = false;
  std::exception_ptr thrown_;
  std::thread thread_;  // last: the thread uses the others at once
};

ReplicaThreads::ReplicaThreads(std::vector<at::Device> devices,
                               int64_t intra_op_threads)
    : devices_(std::move(devices)) {
  const auto on_cpu = std::ranges::count_if(
      devices_, [](auto& device) { return device.is_cpu(); });
  const int callers = at::get_num_threads();
  const int own =
      intra_op_threads > 0
          ? static_cast<int>(intra_op_threads)
          : std::max(1, callers / std::max(1, static_cast<int>(on_cpu)));
  for (size_t replica = 0; replica < devices_.size(); ++replica) {
    threads_.push_back(std::make_unique<Thread>(replica));
    if (!devices_[replica].is_cpu()) continue;
    threads_.back()->start([own] {
      at::get_num_threads();  // the first use in a thread resets it
      at::set_num_threads(own);
    });
    threads_.back()->wait();
  }
  // LibTorch also uses the number that was set last, in any thread, for threads
  // that start later.
  if (on_cpu > 0) at::set_num_threads(callers);
}

ReplicaThreads::~ReplicaThreads() = default;

void ReplicaThreads::run(size_t count,
                         const std::function<void(size_t)>& task) {
  const at::ThreadLocalState state;
  const bool several_on_cpu =
      std::count_if(
          devices_.begin(), devices_.begin() + static_cast<ptrdiff_t>(count),
          [](const at::Device& device) { return device.is_cpu(); }) > 1;
  for (size_t replica = 0; replica < count; ++replica) {
    threads_[replica]->start(
        [&task, &state, replica, stream = current_stream(devices_[replica]),
         beside = several_on_cpu && devices_[replica].is_cpu()] {
          at::ThreadLocalStateGuard guard(state);
          c10::OptionalStreamGuard on_stream(stream);
          beside_replicas = beside;
          task(replica);
        });
  }
  std::optional<size_t> failed;
  std::exception_ptr thrown;
  for (size_t replica = 0; replica < count; ++replica) {
    auto here = threads_[replica]->wait();
    if (here && !failed) {
      failed = replica;
      thrown = std::move(here);
    }
  }
  if (failed) rethrow_of_replica(thrown, *failed, devices_[*failed]);
}

}  // namespace lockstep::internal
