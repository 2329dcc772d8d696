#include "lockstep/parallel/pipeline/schedule_messages.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "lockstep/parallel/pipeline/schedule_places.h"

namespace lockstep {

using ActionKind = PipelineActionKind;

namespace internal {

StagePlaces::StagePlaces(const PipelineSchedule& schedule) {
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const PipelineSlot& slot : schedule.ranks[rank]) {
      for (const PipelineAction& action : slot) {
        ranks_.try_emplace(action.stage, static_cast<int>(rank));
        stages_ = std::max(stages_, action.stage + 1);
      }
    }
  }
}

int StagePlaces::rank_of(int stage) const {
  const auto found = ranks_.find(stage);
  return found == ranks_.end() ? -1 : found->second;
}

bool StagePlaces::are_apart(int stage, int other) const {
  const int one = rank_of(stage);
  const int two = rank_of(other);
  return one >= 0 && two >= 0 && one != two;
}

bool StagePlaces::is_sent(const PipelineAction& action) const {
  if (action.kind == ActionKind::forward) {
    return are_apart(action.stage, action.stage + 1);
  }
  return (action.kind == ActionKind::backward ||
          action.kind == ActionKind::backward_input) &&
         are_apart(action.stage, action.stage - 1);
}

StagePlaces::Message StagePlaces::message_of(
    const PipelineAction& action) const {
  if (action.kind == ActionKind::forward) {
    return {{action.stage, ActionKind::send_forward, action.micro_batch},
            {action.stage + 1, ActionKind::recv_forward, action.micro_batch}};
  }
  return {{action.stage, ActionKind::send_backward, action.micro_batch},
          {action.stage - 1, ActionKind::recv_backward, action.micro_batch}};
}

bool StagePlaces::source_of(const PipelineAction& action,
                            PipelineAction& source) const {
  const int stage = action.stage;
  const int micro_batch = action.micro_batch;
  if (action.kind == ActionKind::forward && stage > 0) {
    source = are_apart(stage, stage - 1)
                 ? PipelineAction{stage, ActionKind::recv_forward, micro_batch}
                 : PipelineAction{stage - 1, ActionKind::forward, micro_batch};
    return true;
  }
  if ((action.kind == ActionKind::backward ||
       action.kind == ActionKind::backward_input) &&
      stage + 1 < stages_) {
    source = are_apart(stage, stage + 1)
                 ? PipelineAction{stage, ActionKind::recv_backward, micro_batch}
                 : PipelineAction{stage + 1, ActionKind::backward, micro_batch};
    return true;
  }
  return false;
}

}  // namespace internal

PipelineSchedule with_messages(const PipelineSchedule& schedule) {
  const internal::StagePlaces places(schedule);
  const size_t ranks = schedule.ranks.size();
  PipelineSchedule result;
  result.ranks.resize(ranks);
  std::vector<size_t> next(ranks, 0);
  std::vector<std::set<PipelineAction>> done(ranks);
  const auto is_ready = [&](size_t rank, const PipelineAction& action) {
    PipelineAction source;
    return !places.source_of(action, source) ||
           internal::has_source(done[rank], source);
  };
  const auto place = [&](int rank, const PipelineAction& action) {
    result.ranks[static_cast<size_t>(rank)].push_back({action});
    done[static_cast<size_t>(rank)].insert(action);
  };
  // Each rank takes one slot in turn, if it has what the slot needs.
  for (bool more = true; more;) {
    more = false;
    bool progress = false;
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (next[rank] == schedule.ranks[rank].size()) continue;
      more = true;
      PipelineSlot slot = schedule.ranks[rank][next[rank]];
      std::erase_if(slot, [](const PipelineAction& action) {
        return !is_compute(action.kind) && !is_message(action.kind);
      });
      if (!std::ranges::all_of(slot, [&](const PipelineAction& action) {
            return is_ready(rank, action);
          })) {
        continue;
      }
      ++next[rank];
      progress = true;
      if (slot.empty()) continue;
      result.ranks[rank].push_back(slot);
      done[rank].insert(slot.begin(), slot.end());
      for (const PipelineAction& action : slot) {
        if (!places.is_sent(action)) continue;
        const auto [send, recv] = places.message_of(action);
        place(static_cast<int>(rank), send);
        place(places.rank_of(recv.stage), recv);
      }
    }
    if (!more || progress) continue;
    std::string waits;
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (next[rank] == schedule.ranks[rank].size()) continue;
      for (const PipelineAction& action : schedule.ranks[rank][next[rank]]) {
        PipelineAction source;
        if (is_ready(rank, action)) continue;
        places.source_of(action, source);
        if (!waits.empty()) waits += "; ";
        waits += "rank " + std::to_string(rank) + " waits before " +
                 to_string(action) + " for " + to_string(source);
      }
    }
    throw std::invalid_argument("the schedule waits for ever: " + waits);
  }
  return result;
}

PipelineSchedule without_messages(const PipelineSchedule& schedule) {
  PipelineSchedule result = schedule;
  for (auto& slots : result.ranks) {
    std::erase_if(slots, [](const PipelineSlot& slot) {
      return slot.size() == 1 && is_message(slot.front().kind);
    });
  }
  return result;
}

}  // namespace lockstep
