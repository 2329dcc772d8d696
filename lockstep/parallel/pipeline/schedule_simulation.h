#pragma once

#include <vector>

#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep {

// How long the actions of a schedule take, in any one unit.
struct PipelineCosts {
  double forward = 1;
  double backward = 2;
  double backward_input = 1;
  double backward_weight = 1;
  // From the end of an action until another rank has its result. Neither rank
  // is busy meanwhile.
  double message = 0;
  // A factor for the costs of each stage; empty means 1 for all.
  std::vector<double> stages{};
};

struct PipelineTimes {
  // When each action runs, in the order of the beginnings on each rank.
  struct Span {
    int rank;
    PipelineAction action;
    double begin;
    double end;
  };
  std::vector<Span> spans{};
  // From the first beginning to the last end.
  double makespan = 0;
  // How long each rank computes.
  std::vector<double> busy{};
  // The part of the ranks' time in which they do not compute, 0 to 1: with p
  // ranks and m micro-batches (p - 1) / (m + p - 1) for GPipe and 1F1B.
  double bubble_fraction = 0;
};

// Computes when each action would run if each rank takes its actions in their
// order as soon as it has what they need. Empty slots and messages of the
// schedule count nothing. Throws std::invalid_argument as with_messages() does,
// or if `costs.stages` has another length than there are stages.
PipelineTimes simulate_pipeline(const PipelineSchedule& schedule,
                                const PipelineCosts& costs = {});

}  // namespace lockstep
