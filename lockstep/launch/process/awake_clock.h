#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep::internal {

// Measures the time in which this process ran. Between two ticks it counts no
// more than `longest_step`: a longer gap means that the process was stopped,
// suspended with its machine or starved. What it did not hear in that time is
// not the fault of others. For one thread.
class AwakeClock {
 public:
  using Clock = std::chrono::steady_clock;

  explicit AwakeClock(Clock::duration longest_step,
                      Clock::time_point now = Clock::now())
      : longest_step_(longest_step), last_(now) {}

  // Must be called more often than once in `longest_step`.
  void tick(Clock::time_point now) {
    const Clock::duration gap = now - last_;
    last_ = now;
    awake_ += std::min(gap, longest_step_);
    if (gap > longest_step_) {
      pause_ = gap;
      pause_end_ = awake_;
    }
  }

  // The time that was counted from construction to the last tick.
  Clock::duration awake() const { return awake_; }
  // The length of the last gap that was too long; zero if it ended longer ago
  // than `within`, or if there was none.
  Clock::duration recent_pause(Clock::duration within) const {
    return awake_ - pause_end_ <= within ? pause_ : Clock::duration();
  }

 private:
  Clock::duration longest_step_;
  Clock::time_point last_;
  Clock::duration awake_{};
  Clock::duration pause_{};
  Clock::duration pause_end_{};  // in the time of awake_
};

}  // namespace lockstep::internal
