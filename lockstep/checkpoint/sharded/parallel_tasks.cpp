#include "lockstep/checkpoint/sharded/parallel_tasks.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/worker/rank_environment.h"

namespace lockstep::internal {

void run_tasks(size_t count, size_t threads,
               const std::function<void(size_t)>& task) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;  // guards the next two
  size_t first = count;
  std::exception_ptr failure;
  const auto work = [&] {
    while (!failed) {
      const size_t index = next++;
      if (index >= count) return;
      try {
        task(index);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failed = true;
        if (index < first) {
          first = index;
          failure = std::current_exception();
        }
      }
    }
  };
  std::vector<std::jthread> others;
  for (size_t i = 1; i < std::min(threads, count); ++i) {
    try {
      others.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // the system has no more threads; fewer do the same
    }
  }
  work();
  others.clear();  // joins them
  if (failure) std::rethrow_exception(failure);
}

size_t reading_threads() {
  return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 4);
}

bool has_spare_core() {
  const auto ranks = get_rank_env("LOCAL_WORLD_SIZE");
  return std::thread::hardware_concurrency() >
         (ranks ? std::strtoul(ranks->c_str(), nullptr, 10) : 1);
}

}  // namespace lockstep::internal
