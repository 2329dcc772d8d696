#include "lockstep/parallel/pipeline/schedule_check.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "lockstep/parallel/pipeline/schedule_places.h"

namespace lockstep {
namespace {

using ActionKind = PipelineActionKind;
using internal::StagePlaces;

[[noreturn]] void refuse(const std::string& problem) {
  throw std::invalid_argument("this schedule cannot be run: " + problem);
}

std::string at_rank(size_t rank) { return "rank " + std::to_string(rank); }

// The actions of one rank in their order.
std::vector<PipelineAction> actions_of(const std::vector<PipelineSlot>& slots) {
  std::vector<PipelineAction> actions;
  for (const PipelineSlot& slot : slots) {
    for (const PipelineAction& action : slot) {
      if (is_compute(action.kind) || is_message(action.kind)) {
        actions.push_back(action);
      }
    }
  }
  return actions;
}

using Lists = std::vector<std::vector<PipelineAction>>;

Lists lists_of(const PipelineSchedule& schedule) {
  Lists lists;
  for (const auto& slots : schedule.ranks) lists.push_back(actions_of(slots));
  return lists;
}

void require_places(const Lists& lists, const StagePlaces& places) {
  for (int stage = 0; stage < places.stages(); ++stage) {
    if (places.rank_of(stage) < 0) {
      refuse("no rank has stage " + std::to_string(stage));
    }
  }
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    if (lists[rank].empty()) refuse(at_rank(rank) + " has nothing to do");
    for (const PipelineAction& action : lists[rank]) {
      const int holder = places.rank_of(action.stage);
      if (holder == static_cast<int>(rank)) continue;
      refuse("stage " + std::to_string(action.stage) + " is on rank " +
             std::to_string(holder) + " and on " + at_rank(rank));
    }
  }
}

// Checks that each action is given once, and whether none is missing.
void require_complete(const Lists& lists, int stages, int micro_batches) {
  std::set<PipelineAction> all;
  for (const auto& actions : lists) {
    for (const PipelineAction& action : actions) {
      if (!all.insert(action).second) {
        refuse(to_string(action) + " is given twice");
      }
    }
  }
  for (int stage = 0; stage < stages; ++stage) {
    for (int i = 0; i < micro_batches; ++i) {
      const auto has = [&](ActionKind kind) {
        return all.contains({stage, kind, i});
      };
      const auto text = [&](ActionKind kind) {
        return to_string(PipelineAction{stage, kind, i});
      };
      if (!has(ActionKind::forward))
        refuse(text(ActionKind::forward) + " is missing");
      const bool in_parts =
          has(ActionKind::backward_input) || has(ActionKind::backward_weight);
      if (has(ActionKind::backward) && in_parts) {
        refuse(text(ActionKind::backward) +
               " is given, and the same backward in parts");
      }
      if (!has(ActionKind::backward) && !has(ActionKind::backward_input)) {
        refuse((in_parts ? text(ActionKind::backward_input)
                         : text(ActionKind::backward)) +
               " is missing");
      }
      if (in_parts && !has(ActionKind::backward_weight)) {
        refuse(text(ActionKind::backward_weight) + " is missing");
      }
    }
  }
}

// The actions that must come before `action` on the same rank.
std::vector<PipelineAction> needs_of(const PipelineAction& action,
                                     const StagePlaces& places) {
  const auto same = [&](ActionKind kind) {
    return PipelineAction{action.stage, kind, action.micro_batch};
  };
  std::vector<PipelineAction> needs;
  PipelineAction source;
  if (places.source_of(action, source)) needs.push_back(source);
  switch (action.kind) {
    case ActionKind::backward:
    case ActionKind::backward_input:
    case ActionKind::send_forward:
    case ActionKind::recv_backward:  // into gradients of the forward's outputs
      needs.push_back(same(ActionKind::forward));
      break;
    case ActionKind::backward_weight:
      needs.push_back(same(ActionKind::backward_input));
      break;
    case ActionKind::send_backward:
      needs.push_back(same(ActionKind::backward));
      break;
    default:
      break;
  }
  return needs;
}

void require_order(const Lists& lists, const StagePlaces& places) {
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    std::set<PipelineAction> done;
    for (const PipelineAction& action : lists[rank]) {
      for (const PipelineAction& need : needs_of(action, places)) {
        if (internal::has_source(done, need)) continue;
        refuse(at_rank(rank) + " has " + to_string(action) + " without " +
               to_string(need) + " before it");
      }
      done.insert(action);
    }
  }
}

// The other end of a message.
PipelineAction other_end(const PipelineAction& action) {
  const int i = action.micro_batch;
  switch (action.kind) {
    case ActionKind::send_forward:
      return {action.stage + 1, ActionKind::recv_forward, i};
    case ActionKind::recv_forward:
      return {action.stage - 1, ActionKind::send_forward, i};
    case ActionKind::send_backward:
      return {action.stage - 1, ActionKind::recv_backward, i};
    default:
      return {action.stage + 1, ActionKind::send_backward, i};
  }
}

void require_both_ends(const Lists& lists, const StagePlaces& places) {
  std::set<PipelineAction> all;
  for (const auto& actions : lists) all.insert(actions.begin(), actions.end());
  for (const PipelineAction& action : all) {
    if (!is_message(action.kind)) continue;
    const PipelineAction other = other_end(action);
    if (!places.are_apart(action.stage, other.stage)) {
      refuse(to_string(action) + " is a message within one rank");
    }
    if (!all.contains(other)) {
      refuse(to_string(action) + " is given without " + to_string(other));
    }
  }
}

// Runs the schedule with sends that block until the receiver receives.
void require_no_deadlock(const Lists& lists, const StagePlaces& places) {
  std::vector<size_t> next(lists.size(), 0);
  const auto is_at = [&](const PipelineAction& action) {
    const auto rank = static_cast<size_t>(places.rank_of(action.stage));
    return next[rank] < lists[rank].size() && lists[rank][next[rank]] == action;
  };
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t rank = 0; rank < lists.size(); ++rank) {
      while (next[rank] < lists[rank].size()) {
        const PipelineAction& action = lists[rank][next[rank]];
        if (is_message(action.kind)) {
          const PipelineAction other = other_end(action);
          if (!is_at(other)) break;
          ++next[static_cast<size_t>(places.rank_of(other.stage))];
        }
        ++next[rank];
        progress = true;
      }
    }
  }
  std::string waits;
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    if (next[rank] == lists[rank].size()) continue;
    const PipelineAction& action = lists[rank][next[rank]];
    const PipelineAction other = other_end(action);
    if (!waits.empty()) waits += "; ";
    waits += at_rank(rank) + " waits in " + to_string(action) + " until rank " +
             std::to_string(places.rank_of(other.stage)) + " is at " +
             to_string(other);
  }
  if (!waits.empty()) refuse("its ranks wait for each other: " + waits);
}

int peak_of(const std::vector<PipelineAction>& actions) {
  int kept = 0;
  int peak = 0;
  for (const PipelineAction& action : actions) {
    if (action.kind == ActionKind::forward) peak = std::max(peak, ++kept);
    if (action.kind == ActionKind::backward ||
        action.kind == ActionKind::backward_weight) {
      --kept;
    }
  }
  return peak;
}

}  // namespace

PipelineScheduleFacts check_pipeline_schedule(
    const PipelineSchedule& schedule) {
  Lists lists = lists_of(schedule);
  const StagePlaces places(schedule);
  if (places.stages() == 0) refuse("it is empty");
  require_places(lists, places);
  PipelineScheduleFacts facts;
  facts.stages = places.stages();
  bool has_messages = false;
  for (const auto& actions : lists) {
    facts.peak_activations.push_back(peak_of(actions));
    for (const PipelineAction& action : actions) {
      facts.micro_batches =
          std::max(facts.micro_batches, action.micro_batch + 1);
      has_messages |= is_message(action.kind);
    }
  }
  for (int stage = 0; stage < facts.stages; ++stage) {
    facts.rank_of_stage.push_back(places.rank_of(stage));
  }
  require_complete(lists, facts.stages, facts.micro_batches);
  if (!has_messages) lists = lists_of(with_messages(schedule));
  require_both_ends(lists, places);
  require_order(lists, places);
  require_no_deadlock(lists, places);
  return facts;
}

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
