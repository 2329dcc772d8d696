#pragma once

#include <cstdint>
#include <string>
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

// Finds the ranks for which the others wait. All functions are pure.

// A rank's own time is its time of a step without exposed communication. As
// ranks wait for each other in every step, their steps take equally long; but
// the rank that the others wait for waits least itself, so its own time is the
// longest.
struct Straggler {
  int rank = 0;
  int64_t own_ns = 0;     // mean over the steps
  int64_t others_ns = 0;  // the median of the others' means
  // On what it spent most of the difference: "compute", "optimizer", "loader",
  // "snapshot" or "idle".
  std::string reason{};
  int64_t reason_ns = 0;    // how much more than the others' median
  size_t slower_steps = 0;  // steps in which its own time was above the
                            // others' median
  // By how much the difference varies from step to step: the standard
  // deviation; 0 if there is one step.
  int64_t spread_ns = 0;
};

struct Balance {
  size_t steps = 0;  // that all ranks have
  // Those whose own time is above the others' by more than 5 % of a step, also
  // if the step is left out in which it is most above: a single slow step makes
  // no straggler, but one slow batch of four does. The slowest is first.
  std::vector<Straggler> stragglers{};
  // Those that would be stragglers if the difference did not vary so much from
  // step to step that chance explains it. The slowest is first.
  std::vector<Straggler> doubtful{};
  // The time by which a step would be shorter, in the mean, if in each step the
  // stragglers' own time were at most that of the slowest other rank.
  int64_t lost_ns = 0;
  // The difference between the ranks' longest and shortest own time, divided by
  // the longest.
  double spread = 0;
};

// The times of the same steps on one rank.
struct RankSteps {
  int rank = 0;
  std::vector<StepTime> steps{};
};

// All ranks must have equally many steps.
Balance compare_ranks(const std::vector<RankSteps>& ranks);

// The mean of the middle two if there are evenly many, 0 if there are none.
int64_t median(std::vector<int64_t> values);

}  // namespace lockstep::internal
