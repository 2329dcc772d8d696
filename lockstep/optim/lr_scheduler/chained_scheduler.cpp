#include "lockstep/optim/lr_scheduler/chained_scheduler.h"

#include <stdexcept>
#include <string>

namespace lockstep::optim {

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
