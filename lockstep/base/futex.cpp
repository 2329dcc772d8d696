#include "lockstep/base/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace lockstep::internal {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
              std::atomic<uint32_t>::is_always_lock_free);

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds allowed, uint32_t bits) {
  // FUTEX_WAIT_BITSET takes a moment, where FUTEX_WAIT takes a duration. The
  // moment is one of CLOCK_MONOTONIC, which is the steady clock of libstdc++
  // and libc++.
  const std::chrono::nanoseconds until =
      std::chrono::steady_clock::now().time_since_epoch() + allowed;
  const auto seconds = std::chrono::floor<std::chrono::seconds>(until);
  const timespec limit{.tv_sec = seconds.count(),
                       .tv_nsec = (until - seconds).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &limit, nullptr,
            bits);
}

void futex_wake_all(const std::atomic<uint32_t>& word, uint32_t bits) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr,
            bits);
}

}  // namespace lockstep::internal
