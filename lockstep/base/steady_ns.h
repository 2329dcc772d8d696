#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::internal {

// Returns the time of the steady clock in nanoseconds. All processes of a host
// share this clock.
inline int64_t steady_ns() {
  return std::chrono::nanoseconds(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace lockstep::internal
