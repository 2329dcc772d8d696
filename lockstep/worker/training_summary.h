#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::internal {

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
