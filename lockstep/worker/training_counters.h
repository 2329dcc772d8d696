#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::internal {

// How far the training of this process has come. Any thread may count; a count
// costs a few nanoseconds. Times are nanoseconds of the steady clock.
class TrainingCounters {
 public:
  static TrainingCounters& instance();

  // An iteration begins, in the calling thread: a forward of a wrapper that
  // averages gradients. Within a WholeStep this counts nothing.
  void count_step() noexcept;
  // Counts a step now, and nothing more in this thread as long as it lives:
  // a step of a pipeline has many forwards.
  class WholeStep {
   public:
    WholeStep() noexcept;
    ~WholeStep();
    WholeStep(const WholeStep&) = delete;
    WholeStep& operator=(const WholeStep&) = delete;
  };
  // A loader gave a batch of this many samples to the training.
  void count_samples(int64_t samples) noexcept;
  // A snapshot is safely written.
  void count_snapshot() noexcept;
  // The line of this process's progress bar; empty if there is none.
  void set_progress(std::string_view line);

  int64_t steps() const { return steps_.load(std::memory_order_relaxed); }
  int64_t last_step_ns() const {
    return last_step_ns_.load(std::memory_order_relaxed);
  }
  int64_t samples() const { return samples_.load(std::memory_order_relaxed); }
  int64_t last_snapshot_ns() const {
    return last_snapshot_ns_.load(std::memory_order_relaxed);
  }
  std::string progress() const;

 private:
  std::atomic<int64_t> steps_{0};
  std::atomic<int64_t> last_step_ns_{0};
  std::atomic<int64_t> samples_{0};
  std::atomic<int64_t> last_snapshot_ns_{0};
};

}  // namespace lockstep::internal
