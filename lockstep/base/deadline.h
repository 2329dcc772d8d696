#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

// The longest timeout that is told apart from a longer one: some 24 days. What
// is handed to LibTorch or to the system is cut to it (bounded_timeout()), as
// they add it to a clock, or count it in an int of milliseconds.
inline constexpr std::chrono::milliseconds kBoundedTimeout{0x7fffffff};

constexpr std::chrono::milliseconds bounded_timeout(
    std::chrono::milliseconds timeout) {
  return std::min(timeout, kBoundedTimeout);
}

// A moment after which a wait is given up. Every wait in Lockstep takes one,
// so that a sequence of waits shares one allowance instead of adding up.
// A value type; safe to copy between threads.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `allowed` from now; zero or less has passed already, and
  // milliseconds::max() never passes.
  // `now`: for who has read the clock.
  static Deadline after(std::chrono::milliseconds allowed,
                        Clock::time_point now = Clock::now()) {
    return Deadline(now, allowed);
  }

  bool expired() const { return Clock::now() >= end_; }

  // What is left, never negative; rounded up, so that a poll() over it does
  // not turn into a busy loop in the last millisecond.
  std::chrono::milliseconds remaining() const {
    auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(0));
  }

  // For messages: "after 312 ms of 300 ms".
  std::chrono::milliseconds elapsed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() -
                                                                 start_);
  }
  std::chrono::milliseconds allowed() const { return allowed_; }

 private:
  Deadline(Clock::time_point start, std::chrono::milliseconds allowed)
      : start_(start),
        allowed_(allowed),
        // The clock counts nanoseconds, which milliseconds::max() overflows.
        end_(allowed < std::chrono::floor<std::chrono::milliseconds>(
                           Clock::time_point::max() - start)
                 ? start + std::max(allowed, std::chrono::milliseconds(0))
                 : Clock::time_point::max()) {}

  Clock::time_point start_;
  std::chrono::milliseconds allowed_;
  Clock::time_point end_;
};

}  // namespace lockstep
