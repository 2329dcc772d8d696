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

// Says at the end of a process how fast it trained, for `lockstep report
// scaling`: the file rank-<RANK>.json in the folder that the environment
// variable LOCKSTEP_TRAINING_SUMMARY names. It is an object of
//
//   samples         what TrainingCounters counted
//   samples_per_s   between the first and the last batch of a loader, without
//                   the samples of the last; null if there were fewer than two
//   metrics         the last value of each number that the process logged
//                   (MetricsLogger, SummaryWriter::add_scalar()); null if it
//                   was not finite
//   target_s        seconds from the first step or batch until the metric of
//                   LOCKSTEP_TRAINING_TARGET (MetricTarget) first met its
//                   target; null if it never did
//
// The file is written by a process that has counted a step or samples and ends
// by exit() or from main(); one that is killed, and a child of fork(), leave
// none. Without the variable nothing happens.
class TrainingSummary {
 public:
  // A loader gives a batch of this many samples, at this time of the steady
  // clock, or a step begins (no samples). Any thread.
  static void note_progress(int64_t samples, int64_t now_ns) noexcept;
  // The process logs a number. Costs a load if nobody asked for a summary. Any
  // thread.
  static void note_metric(std::string_view name, double value);
};

// "loss<=0.3": a number that a training logs, and when it is good enough.
struct MetricTarget {
  std::string_view name;
  bool at_most = true;  // false means at least
  double value = 0;

  // `text` must outlive the result. Throws std::invalid_argument that says what
  // is allowed.
  static MetricTarget parse(std::string_view text);
  bool is_met(double number) const;
};

}  // namespace lockstep::internal
