#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/cli/report/step_time.h"

// Finds the ranks for which the others wait. All functions are pure.
namespace lockstep::internal {

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
