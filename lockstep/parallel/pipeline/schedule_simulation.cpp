#include "lockstep/parallel/pipeline/schedule_simulation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string>

#include "lockstep/parallel/pipeline/schedule_check.h"
#include "lockstep/parallel/pipeline/schedule_places.h"

namespace lockstep {
namespace {

using ActionKind = PipelineActionKind;
using internal::StagePlaces;

double cost_of(const PipelineAction& action, const PipelineCosts& costs) {
  const double factor = costs.stages.empty()
                            ? 1
                            : costs.stages[static_cast<size_t>(action.stage)];
  switch (action.kind) {
    case ActionKind::forward:
      return factor * costs.forward;
    case ActionKind::backward:
      return factor * costs.backward;
    case ActionKind::backward_input:
      return factor * costs.backward_input;
    default:
      return factor * costs.backward_weight;
  }
}

// Returns the action of another stage whose result `action` uses: in `ends`,
// the ends of what has run. Returns false if there is none.
bool source_of(const PipelineAction& action, int stages,
               PipelineAction& source) {
  if (action.kind == ActionKind::forward) {
    source = {action.stage - 1, ActionKind::forward, action.micro_batch};
    return action.stage > 0;
  }
  source = {action.stage + 1, ActionKind::backward, action.micro_batch};
  return action.kind != ActionKind::backward_weight &&
         action.stage + 1 < stages;
}

}  // namespace

PipelineTimes simulate_pipeline(const PipelineSchedule& schedule,
                                const PipelineCosts& costs) {
  // It also throws if ranks wait for ever, so that the loop below ends.
  const PipelineSchedule lowered = with_messages(without_messages(schedule));
  const StagePlaces places(lowered);
  if (!costs.stages.empty() &&
      costs.stages.size() != static_cast<size_t>(places.stages())) {
    throw std::invalid_argument(
        "the costs are for " + std::to_string(costs.stages.size()) +
        " stages, but the schedule has " + std::to_string(places.stages()));
  }
  const size_t ranks = lowered.ranks.size();
  std::vector<std::vector<PipelineAction>> lists(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (const PipelineSlot& slot : lowered.ranks[rank]) {
      for (const PipelineAction& action : slot) {
        if (is_compute(action.kind)) lists[rank].push_back(action);
      }
    }
  }
  PipelineTimes times;
  times.busy.assign(ranks, 0);
  std::vector<double> free(ranks, 0);
  std::vector<size_t> next(ranks, 0);
  std::map<PipelineAction, double> ends;
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t rank = 0; rank < ranks; ++rank) {
      while (next[rank] < lists[rank].size()) {
        const PipelineAction action = lists[rank][next[rank]];
        double begin = free[rank];
        PipelineAction source;
        if (source_of(action, places.stages(), source)) {
          auto end = ends.find(source);
          if (end == ends.end() && source.kind == ActionKind::backward) {
            source.kind = ActionKind::backward_input;
            end = ends.find(source);
          }
          if (end == ends.end()) break;
          const bool is_far = places.are_apart(action.stage, source.stage);
          begin = std::max(begin, end->second + (is_far ? costs.message : 0));
        }
        const double cost = cost_of(action, costs);
        times.spans.push_back(
            {static_cast<int>(rank), action, begin, begin + cost});
        times.busy[rank] += cost;
        times.makespan = std::max(times.makespan, begin + cost);
        free[rank] = ends[action] = begin + cost;
        ++next[rank];
        progress = true;
      }
    }
  }
  double busy = 0;
  for (const double one : times.busy) busy += one;
  const double all = times.makespan * static_cast<double>(ranks);
  times.bubble_fraction = all > 0 ? 1 - busy / all : 0;
  return times;
}

PipelineSchedule aligned(const PipelineSchedule& schedule) {
  const PipelineTimes times = simulate_pipeline(schedule, {.backward = 1});
  PipelineSchedule result;
  result.ranks.resize(schedule.ranks.size());
  for (const PipelineTimes::Span& span : times.spans) {
    auto& slots = result.ranks[static_cast<size_t>(span.rank)];
    slots.resize(static_cast<size_t>(std::lround(span.begin)));
    slots.push_back({span.action});
  }
  return result;
}

}  // namespace lockstep
