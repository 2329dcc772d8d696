#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/cli/report/trace_events.h"
#include "lockstep/cli/report/trace_file.h"

// Where the time of a rank went. All functions are pure.
namespace lockstep::internal {

// The activities of a rank, over all its threads and streams. If the trace has
// events of a GPU, only those compute, and host threads count where they wait
// for communication, load data or save.
struct RankActivity {
  // Moments at which an operator of LibTorch or a kernel ran, or any other
  // operator that holds no other event: then the rank computes, whatever else
  // goes on.
  Intervals computing{};
  // The same, but only within an optimizer's events.
  Intervals optimizing{};
  // Moments at which a thread saves or loads, and does not communicate in it.
  Intervals snapshot{};
  Intervals loader{};
  Intervals communication{};
  // Moments inside any event of the kind. These may hold a wait of the thread,
  // so they count only when nothing of the above goes on.
  Intervals around_optimizer{};
  Intervals around_compute{};
};

RankActivity rank_activity(const std::vector<TraceThread>& threads);

// The time of a step in nanoseconds. Every moment of the step is in exactly one
// of the first six.
struct StepTime {
  int64_t compute = 0;
  int64_t optimizer = 0;
  int64_t exposed = 0;  // communication during which the rank did nothing else
  int64_t loader = 0;
  int64_t snapshot = 0;
  int64_t idle = 0;
  // Communication during which the rank computed: a part of `compute` and
  // `optimizer`.
  int64_t overlapped = 0;

  int64_t total() const {
    return compute + optimizer + exposed + loader + snapshot + idle;
  }
  // The time that the rank spent without waiting for others.
  int64_t own() const { return total() - exposed; }
  StepTime& operator+=(const StepTime& other);
};

StepTime step_time(const RankActivity& activity, Interval step);

// Returns the floating-point operations of the events that begin in `window`.
// If an event and one inside it both tell them, the outer one counts.
double flops_within(const std::vector<TraceThread>& threads, Interval window);

}  // namespace lockstep::internal
