#include "lockstep/parallel/pipeline/schedules.h"

#include <algorithm>
#include <cctype>
#include <deque>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>

namespace lockstep {
namespace {

using ActionKind = PipelineActionKind;
constexpr ActionKind kF = ActionKind::forward;
constexpr ActionKind kB = ActionKind::backward;
constexpr ActionKind kI = ActionKind::backward_input;
constexpr ActionKind kW = ActionKind::backward_weight;

std::string digits_of(int value) { return std::to_string(value); }

void require_positive(const char* schedule, const char* what, int value) {
  if (value < 1) {
    throw std::invalid_argument(std::string(schedule) + " was asked for " +
                                digits_of(value) + " " + what +
                                "; give at least 1");
  }
}

void require_shape(const char* schedule, int ranks, int micro_batches,
                   int stages_per_rank = 1) {
  require_positive(schedule, "ranks", ranks);
  require_positive(schedule, "micro-batches", micro_batches);
  require_positive(schedule, "stages a rank", stages_per_rank);
}

// Lists what one rank does. Each kind of action of each stage takes the
// micro-batches in ascending order.
class RankPlan {
 public:
  void idle(int slots) {
    for (int i = 0; i < slots; ++i) slots_.emplace_back();
  }
  void add(int stage, ActionKind kind) {
    slots_.push_back({next(stage, kind)});
  }
  void add_overlapped(int forward_stage, int backward_stage) {
    const PipelineAction forward = next(forward_stage, kF);
    slots_.push_back({forward, next(backward_stage, kB)});
  }
  // Adds a backward for inputs whose second part add_pending_weight() adds
  // later, in the order in which the first parts were added.
  void add_input(int stage) {
    add(stage, kI);
    pending_.push_back(slots_.back().front());
  }
  bool has_pending_weight() const { return !pending_.empty(); }
  void add_pending_weight() {
    if (pending_.empty()) return;
    PipelineAction weight = pending_.front();
    pending_.pop_front();
    weight.kind = kW;
    slots_.push_back({weight});
  }
  int count(int stage, ActionKind kind) { return counts_[{stage, kind}]; }

  std::vector<PipelineSlot> slots() && { return std::move(slots_); }

 private:
  PipelineAction next(int stage, ActionKind kind) {
    // A whole backward and one in two parts take from the same micro-batches.
    const ActionKind counted = kind == kB ? kI : kind;
    return {stage, kind, counts_[{stage, counted}]++};
  }

  std::vector<PipelineSlot> slots_;
  std::map<std::pair<int, ActionKind>, int> counts_;
  std::deque<PipelineAction> pending_;
};

// Interleaved 1F1B and its zero-bubble form differ in few places.
PipelineSchedule interleaved(const char* name, int ranks, int micro_batches,
                             int stages_per_rank, bool zero_bubble) {
  require_shape(name, ranks, micro_batches, stages_per_rank);
  const int rounds = std::max(1, micro_batches / ranks);
  if (micro_batches % rounds != 0) {
    throw std::invalid_argument(
        std::string(name) + " with " + digits_of(ranks) + " ranks divides " +
        digits_of(micro_batches) + " micro-batches into " + digits_of(rounds) +
        " rounds, which does not go; give a multiple of " + digits_of(rounds) +
        ", such as " + digits_of(micro_batches / ranks * ranks));
  }
  const int per_round = micro_batches / rounds;
  const int all = micro_batches * stages_per_rank;
  PipelineSchedule schedule;
  for (int rank = 0; rank < ranks; ++rank) {
    RankPlan plan;
    const int hops = ranks - 1 - rank;
    const int warm_up = std::min(
        (stages_per_rank - 1) * per_round + (zero_bubble ? 1 : 2) * hops, all);
    const auto forward_stage = [&](int i) {
      return i / per_round % stages_per_rank * ranks + rank;
    };
    const auto backward_stage = [&](int i) {
      return (stages_per_rank - 1 - i / per_round % stages_per_rank) * ranks +
             rank;
    };
    plan.idle(rank);
    for (int i = 0; i < warm_up; ++i) plan.add(forward_stage(i), kF);
    if (warm_up > 0) {
      // The first backward of this rank comes two slots later for each rank
      // between it and the last one.
      plan.idle(zero_bubble
                    ? hops
                    : stages_per_rank * ranks + 2 * hops - (warm_up + rank));
    }
    for (int i = 0; i < all; ++i) {
      if (warm_up + i < all) {
        plan.add(forward_stage(warm_up + i), kF);
      } else if (!zero_bubble) {
        plan.idle(1);
      }
      if (!zero_bubble) {
        plan.add(backward_stage(i), kB);
        continue;
      }
      plan.add_input(backward_stage(i));
      if (i >= rank) plan.add_pending_weight();
    }
    while (plan.has_pending_weight()) plan.add_pending_weight();
    schedule.ranks.push_back(std::move(plan).slots());
  }
  return schedule;
}

// Delays each forward until the slot after that of the previous stage.
PipelineSchedule with_bubbles(const PipelineSchedule& schedule) {
  PipelineSchedule result;
  result.ranks.resize(schedule.ranks.size());
  std::vector<size_t> next(schedule.ranks.size(), 0);
  std::set<PipelineAction> seen;
  for (bool more = true; more;) {
    more = false;
    std::vector<PipelineAction> now;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      if (next[rank] == schedule.ranks[rank].size()) continue;
      more = true;
      const PipelineSlot& slot = schedule.ranks[rank][next[rank]];
      const bool waits = !slot.empty() && slot.front().kind == kF &&
                         slot.front().stage > 0 &&
                         !seen.contains({slot.front().stage - 1, kF,
                                         slot.front().micro_batch});
      if (waits) {
        result.ranks[rank].emplace_back();
        continue;
      }
      result.ranks[rank].push_back(slot);
      now.insert(now.end(), slot.begin(), slot.end());
      ++next[rank];
    }
    seen.insert(now.begin(), now.end());
  }
  return result;
}

}  // namespace

PipelineSchedule schedule_gpipe(int ranks, int micro_batches) {
  require_shape("GPipe", ranks, micro_batches);
  PipelineSchedule schedule;
  for (int rank = 0; rank < ranks; ++rank) {
    RankPlan plan;
    for (int i = 0; i < micro_batches; ++i) plan.add(rank, kF);
    for (int i = 0; i < micro_batches; ++i) plan.add(rank, kB);
    schedule.ranks.push_back(std::move(plan).slots());
  }
  return schedule;
}

PipelineSchedule schedule_1f1b(int ranks, int micro_batches) {
  require_shape("1F1B", ranks, micro_batches);
  if (micro_batches < ranks) {
    throw std::invalid_argument("1F1B with " + digits_of(ranks) +
                                " stages was asked for " +
                                digits_of(micro_batches) +
                                " micro-batches; give at least as many as "
                                "stages, or use GPipe");
  }
  PipelineSchedule schedule;
  for (int rank = 0; rank < ranks; ++rank) {
    RankPlan plan;
    for (int i = 0; i < ranks - 1 - rank; ++i) plan.add(rank, kF);
    for (int i = 0; i < micro_batches; ++i) {
      if (plan.count(rank, kF) < micro_batches) plan.add(rank, kF);
      plan.add(rank, kB);
    }
    schedule.ranks.push_back(std::move(plan).slots());
  }
  return schedule;
}

PipelineSchedule schedule_looped_bfs(int ranks, int micro_batches,
                                     int stages_per_rank) {
  require_shape("LoopedBFS", ranks, micro_batches, stages_per_rank);
  PipelineSchedule schedule;
  for (int rank = 0; rank < ranks; ++rank) {
    RankPlan plan;
    plan.idle(rank);
    for (int k = 0; k < stages_per_rank; ++k) {
      for (int i = 0; i < micro_batches; ++i) plan.add(k * ranks + rank, kF);
    }
    plan.idle(2 * (ranks - 1 - rank));
    std::vector<PipelineSlot> slots = std::move(plan).slots();
    for (int k = stages_per_rank - 1; k >= 0; --k) {
      for (int i = micro_batches - 1; i >= 0; --i) {
        slots.push_back({{k * ranks + rank, kB, i}});
      }
    }
    schedule.ranks.push_back(std::move(slots));
  }
  return schedule;
}

PipelineSchedule schedule_interleaved_1f1b(int ranks, int micro_batches,
                                           int stages_per_rank) {
  return interleaved("Interleaved1F1B", ranks, micro_batches, stages_per_rank,
                     /*zero_bubble=*/false);
}

PipelineSchedule schedule_interleaved_zero_bubble(int ranks, int micro_batches,
                                                  int stages_per_rank) {
  return with_bubbles(interleaved("InterleavedZeroBubble", ranks, micro_batches,
                                  stages_per_rank, /*zero_bubble=*/true));
}

PipelineSchedule schedule_zbv_zero_bubble(int ranks, int micro_batches) {
  require_shape("ZBVZeroBubble", ranks, micro_batches);
  // With fewer micro-batches the schedule is that of as many, with holes.
  const int count = std::max(2 * ranks - 1, micro_batches);
  PipelineSchedule schedule;
  for (int rank = 0; rank < ranks; ++rank) {
    const int down = rank;                // the stage on the way down the V
    const int up = 2 * ranks - 1 - rank;  // the stage on the way up
    RankPlan plan;
    const auto forward_and_backward = [&](int stage) {
      plan.add(stage, kF);
      plan.add(stage, kI);
      plan.add(stage, kW);
    };
    plan.idle(rank);
    for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) plan.add(down, kF);
    for (int i = 0; i < rank; ++i) {
      plan.add(up, kF);
      plan.add(down, kF);
    }
    for (int i = 0; i < ranks - rank; ++i) forward_and_backward(up);
    while (plan.count(up, kF) < plan.count(down, kF) ||
           plan.count(down, kF) < count) {
      if (plan.count(down, kF) < count) plan.add(down, kF);
      plan.add(down, kI);
      plan.add(down, kW);
      forward_and_backward(up);
    }
    for (int i = 0; i < rank; ++i) {
      plan.add(down, kI);
      plan.add(up, kI);
    }
    for (int i = 0; i < ranks - rank; ++i) {
      plan.add(down, kI);
      plan.add(down, kW);
    }
    for (int stage : {up, down}) {
      while (plan.count(stage, kW) < plan.count(stage, kI)) plan.add(stage, kW);
    }
    std::vector<PipelineSlot> slots = std::move(plan).slots();
    for (PipelineSlot& slot : slots) {
      std::erase_if(slot, [&](const PipelineAction& action) {
        return action.micro_batch >= micro_batches;
      });
    }
    schedule.ranks.push_back(std::move(slots));
  }
  return schedule;
}

PipelineSchedule schedule_dual_pipe_v(int ranks, int micro_batches) {
  require_shape("DualPipeV", ranks, micro_batches);
  if (micro_batches < 2 * ranks) {
    throw std::invalid_argument(
        "DualPipeV with " + digits_of(2 * ranks) + " stages was asked for " +
        digits_of(micro_batches) +
        " micro-batches; give at least as many as stages");
  }
  PipelineSchedule schedule;
  for (int rank = 0; rank < ranks; ++rank) {
    const int down = rank;
    const int up = 2 * ranks - 1 - rank;
    const int hops = ranks - 1 - rank;
    RankPlan plan;
    for (int i = 0; i < 2 * hops; ++i) plan.add(down, kF);
    for (int i = 0; i < rank + 1; ++i) {
      plan.add(down, kF);
      plan.add(up, kF);
    }
    for (int i = 0; i < hops; ++i) {
      plan.add_input(up);
      plan.add_pending_weight();
      plan.add(up, kF);
    }
    for (int i = 0; i < micro_batches - 2 * ranks + rank + 1; ++i) {
      if (i == 0 && rank == ranks - 1) {
        plan.add(down, kF);
        plan.add(up, kB);
      } else {
        plan.add_overlapped(down, up);
      }
      plan.add_overlapped(up, down);
    }
    for (int i = 0; i < hops; ++i) {
      plan.add(up, kB);
      plan.add_overlapped(up, down);
    }
    // The second half of these backwards is in two parts, to fill the bubble.
    const auto backward = [&](int stage, int step, int first_in_parts) {
      if (step >= first_in_parts) {
        plan.add_input(stage);
      } else {
        plan.add(stage, kB);
      }
    };
    const int half = (rank + 1) / 2;
    for (int i = 0; i < rank + 1; ++i) {
      backward(up, i, rank % 2 == 1 ? half : half + 1);
      backward(down, i, half);
    }
    for (int i = 0; i < hops; ++i) {
      plan.add_pending_weight();
      plan.add_input(down);
    }
    for (int i = 0; i < rank + 1; ++i) plan.add_pending_weight();
    schedule.ranks.push_back(std::move(plan).slots());
  }
  return schedule;
}

PipelineSchedule make_pipeline_schedule(const std::string& name, int ranks,
                                        int micro_batches,
                                        int stages_per_rank) {
  std::string lower = name;
  for (char& c : lower) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  const auto require_stages = [&](int stages) {
    if (stages_per_rank != stages) {
      throw std::invalid_argument(name + " has " + digits_of(stages) +
                                  (stages == 1 ? " stage" : " stages") +
                                  " a rank, but " + digits_of(stages_per_rank) +
                                  " were given");
    }
  };
  if (lower == "gpipe" || lower == "1f1b") {
    require_stages(1);
    return lower == "gpipe" ? schedule_gpipe(ranks, micro_batches)
                            : schedule_1f1b(ranks, micro_batches);
  }
  if (lower == "zbvzerobubble" || lower == "dualpipev") {
    require_stages(2);
    return lower == "dualpipev"
               ? schedule_dual_pipe_v(ranks, micro_batches)
               : schedule_zbv_zero_bubble(ranks, micro_batches);
  }
  if (lower == "loopedbfs") {
    return schedule_looped_bfs(ranks, micro_batches, stages_per_rank);
  }
  if (lower == "interleaved1f1b") {
    return schedule_interleaved_1f1b(ranks, micro_batches, stages_per_rank);
  }
  if (lower == "interleavedzerobubble") {
    return schedule_interleaved_zero_bubble(ranks, micro_batches,
                                            stages_per_rank);
  }
  throw std::invalid_argument(
      "there is no schedule \"" + name +
      "\"; there are GPipe, 1F1B, LoopedBFS, Interleaved1F1B, "
      "InterleavedZeroBubble, ZBVZeroBubble and DualPipeV");
}

}  // namespace lockstep
