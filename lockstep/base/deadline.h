#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace lockstep::internal {

// The longest timeout that LibTorch and the system are given: about 24 days.
// bounded_timeout() shortens a longer one to it, because LibTorch and the
// system add a timeout to a clock or count its milliseconds in an int, and both
// could overflow.
inline constexpr std::chrono::milliseconds kBoundedTimeout{0x7fffffff};

constexpr std::chrono::milliseconds bounded_timeout(
    std::chrono::milliseconds timeout) {
  return std::min(timeout, kBoundedTimeout);
}

// The moment after which a wait is given up. Every wait in Lockstep takes a
// deadline, so that a sequence of waits shares one timeout instead of having
// one each. A value type; safe to copy between threads.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // Returns the deadline that comes `allowed` after `now`. If `allowed` is zero
  // or less the deadline has passed already; if it is milliseconds::max() it
  // never passes. Pass `now` if the caller has just read the clock.
  static Deadline after(std::chrono::milliseconds allowed,
                        Clock::time_point now = Clock::now()) {
    return Deadline(now, allowed);
  }

  bool expired() const { return Clock::now() >= end_; }

  // Returns the time that is left, never negative. It is rounded up, so that a
  // poll() with it does not turn into a busy loop in the last millisecond.
  std::chrono::milliseconds remaining() const {
    auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(0));
  }

  // For error texts: "after 312 ms of 300 ms".
  std::chrono::milliseconds elapsed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() -
                                                                 start_);
  }
  std::chrono::milliseconds allowed() const { return allowed_; }

 private:
  Deadline(Clock::time_point start, std::chrono::milliseconds allowed)
      : start_(start),
        allowed_(allowed),
        // The clock counts nanoseconds; milliseconds::max() would overflow it.
        end_(allowed < std::chrono::floor<std::chrono::milliseconds>(
                           Clock::time_point::max() - start)
                 ? start + std::max(allowed, std::chrono::milliseconds(0))
                 : Clock::time_point::max()) {}

  Clock::time_point start_;
  std::chrono::milliseconds allowed_;
  Clock::time_point end_;
};

// Returns "0.5 s": a time as the launcher's messages write it.
inline std::string seconds_text(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s",
                static_cast<double>(time.count()) / 1000);
  return text;
}

// Returns the time of the steady clock in nanoseconds. All processes of a host
// share this clock.
inline int64_t steady_ns() {
  return std::chrono::nanoseconds(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace lockstep::internal
