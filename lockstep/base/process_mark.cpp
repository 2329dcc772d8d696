#include "lockstep/base/process_mark.h"

#include <pthread.h>

#include <atomic>

namespace lockstep::internal {
namespace {

// How many forks lie between the start of the program and this process.
std::atomic<uint64_t> forks{0};

void count_in_child() { forks.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

ProcessMark::ProcessMark() {
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(nullptr, nullptr, count_in_child);
  forks_ = forks.load(std::memory_order_relaxed);
}

bool ProcessMark::is_foreign() const noexcept {
  return forks.load(std::memory_order_relaxed) != forks_;
}

}  // namespace lockstep::internal
