#include "lockstep/optim/lr_scheduler/composed_schedulers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lockstep::optim {

SequentialLR::SequentialLR(internal::SchedulerGroupsPtr groups,
                           const SequentialLROptions& options)
    : LRScheduler(std::move(groups), "SequentialLR"),
      milestones_(options.milestones) {
  if (options.schedulers.empty() ||
      milestones_.size() + 1 != options.schedulers.size()) {
    throw std::invalid_argument(
        "SequentialLR has " + std::to_string(options.schedulers.size()) +
        " schedulers and " + std::to_string(milestones_.size()) +
        " milestones; give at least one scheduler, and a milestone for each "
        "but the first");
  }
  if (!std::is_sorted(milestones_.begin(), milestones_.end())) {
    throw std::invalid_argument(
        "SequentialLR: the milestones are not in ascending order");
  }
  if (std::any_of(options.schedulers.begin() + 1, options.schedulers.end(),
                  [](const Schedule& part) { return part.is_composite_; })) {
    throw std::invalid_argument(
        "SequentialLR cannot change over to a SequentialLR or a "
        "ChainedScheduler; list their schedulers here, or put a SequentialLR "
        "into a ChainedScheduler");
  }
  for (const Schedule& schedule : options.schedulers) {
    schedulers_.push_back(schedule.make_(groups_));
  }
  // Each scheduler has made its first step. That is taken back, and the first
  // one makes it again. (Python's SequentialLR does the same.)
  last_epoch_ = 0;
  for (size_t group = 0; group < groups_->size(); ++group) {
    groups_->set_lr(group, groups_->initial_lr(group));
  }
  SequentialLR::undo_step();
  LRScheduler& first = *schedulers_[active(last_epoch_)];
  first.initial_step();
  last_lr_ = first.last_lr_;
}

// Returns the index of the scheduler of an epoch.
size_t SequentialLR::active(int64_t epoch) const {
  return static_cast<size_t>(
      std::upper_bound(milestones_.begin(), milestones_.end(), epoch) -
      milestones_.begin());
}

void SequentialLR::step() {
  ++last_epoch_;
  const size_t index = active(last_epoch_);
  LRScheduler& scheduler = *schedulers_[index];
  try {
    if (index > 0 && milestones_[index - 1] == last_epoch_) {
      scheduler.begin();
    } else {
      scheduler.step();
    }
  } catch (...) {
    --last_epoch_;
    throw;
  }
  last_lr_ = scheduler.last_lr_;
}

void SequentialLR::initial_step() { step(); }

// Python takes back the steps of the schedulers and not this one's own count.
void SequentialLR::undo_step() {
  for (const auto& scheduler : schedulers_) scheduler->undo_step();
}

// The constructor refuses a SequentialLR that would be begun.
void SequentialLR::begin() { step(); }

void SequentialLR::check_groups() const {
  schedulers_[active(last_epoch_ + 1)]->check_groups();
}

void SequentialLR::list_state(internal::StateFields& fields) {
  LRScheduler::list_state(fields);
  fields.add("last_epoch", last_epoch_);
  fields.add("_milestones", milestones_, milestones_.size());
  ChainedScheduler::list_parts(fields, schedulers_);
}

ChainedScheduler::ChainedScheduler(internal::SchedulerGroupsPtr groups,
                                   const ChainedSchedulerOptions& options)
    : LRScheduler(std::move(groups), "ChainedScheduler") {
  if (options.schedulers.empty()) {
    throw std::invalid_argument(
        "ChainedScheduler has no schedulers; give at least one");
  }
  for (const Schedule& schedule : options.schedulers) {
    schedulers_.push_back(schedule.make_(groups_));
  }
  last_lr_ = groups_->lrs();
}

void ChainedScheduler::step() {
  check_groups();
  for (const auto& scheduler : schedulers_) scheduler->step();
  last_lr_ = groups_->lrs();
}

int64_t ChainedScheduler::last_epoch() const {
  return schedulers_.back()->last_epoch();
}

void ChainedScheduler::initial_step() { step(); }

void ChainedScheduler::undo_step() {
  for (const auto& scheduler : schedulers_) scheduler->undo_step();
}

// SequentialLR refuses a ChainedScheduler that it would have to begin.
void ChainedScheduler::begin() { step(); }

void ChainedScheduler::check_groups() const {
  for (const auto& scheduler : schedulers_) scheduler->check_groups();
}

void ChainedScheduler::list_parts(internal::StateFields& fields,
                                  const Parts& parts) {
  fields.add(
      "_schedulers",
      [&parts] {
        StateTree::List states;
        for (const auto& part : parts) {
          states.emplace_back(part->state_fields().capture());
        }
        return StateTree(std::move(states));
      },
      [&parts, name = fields.scheduler()](
          const StateTree& state) -> std::function<void()> {
        const auto& states = internal::list_in(state, name, "_schedulers");
        if (states.size() != parts.size()) {
          internal::refuse_state(name, "it has " +
                                           std::to_string(states.size()) +
                                           " schedulers, there are " +
                                           std::to_string(parts.size()));
        }
        std::vector<std::function<void()>> loads;
        for (size_t i = 0; i < parts.size(); ++i) {
          loads.push_back(parts[i]->prepare_load(states[i]));
        }
        return [loads = std::move(loads)] {
          for (const auto& load : loads) load();
        };
      });
}

void ChainedScheduler::list_state(internal::StateFields& fields) {
  LRScheduler::list_state(fields);
  list_parts(fields, schedulers_);
}

}  // namespace lockstep::optim
