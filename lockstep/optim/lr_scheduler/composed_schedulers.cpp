#include "lockstep/optim/lr_scheduler/composed_schedulers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "lockstep/optim/lr_scheduler/scheduler_rule.h"

namespace lockstep::internal {
namespace {

using Parts = std::vector<std::unique_ptr<SchedulerRule>>;

Parts make_parts(const std::vector<optim::Schedule>& schedules,
                 const SchedulerGroupsPtr& groups) {
  Parts parts;
  for (const optim::Schedule& schedule : schedules) {
    parts.push_back(SchedulerRule::make(schedule, groups));
  }
  return parts;
}

// Adds Python's `_schedulers`, a list of the parts' states.
void list_parts(StateFields& fields, const Parts& parts) {
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
        const auto& states = list_in(state, name, "_schedulers");
        if (states.size() != parts.size()) {
          refuse_state(name, "it has " + std::to_string(states.size()) +
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

class SequentialRule final : public SchedulerRule {
 public:
  SequentialRule(SchedulerGroupsPtr groups,
                 const optim::SequentialLROptions& options)
      : SchedulerRule(std::move(groups), "SequentialLR"),
        milestones_(options.milestones) {
    const std::vector<optim::Schedule>& schedules = options.schedulers;
    if (schedules.empty() || milestones_.size() + 1 != schedules.size()) {
      throw std::invalid_argument(
          "SequentialLR has " + std::to_string(schedules.size()) +
          " schedulers and " + std::to_string(milestones_.size()) +
          " milestones; give at least one scheduler, and a milestone for each "
          "but the first");
    }
    if (!std::is_sorted(milestones_.begin(), milestones_.end())) {
      throw std::invalid_argument(
          "SequentialLR: the milestones are not in ascending order");
    }
    if (std::any_of(schedules.begin() + 1, schedules.end(), is_composite)) {
      throw std::invalid_argument(
          "SequentialLR cannot change over to a SequentialLR or a "
          "ChainedScheduler; list their schedulers here, or put a SequentialLR "
          "into a ChainedScheduler");
    }
    schedulers_ = make_parts(schedules, groups_);
    // Each scheduler has made its first step. That is taken back, and the first
    // one makes it again. (Python's SequentialLR does the same.)
    last_epoch_ = 0;
    for (size_t group = 0; group < groups_->size(); ++group) {
      groups_->set_lr(group, groups_->initial_lr(group));
    }
    SequentialRule::undo_step();
    SchedulerRule& first = *schedulers_[active(last_epoch_)];
    first.initial_step();
    last_lr_ = first.last_lr();
  }

  void step() override {
    ++last_epoch_;
    const size_t index = active(last_epoch_);
    SchedulerRule& scheduler = *schedulers_[index];
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
    last_lr_ = scheduler.last_lr();
  }

  void initial_step() override { step(); }

  // Python takes back the steps of the schedulers and not this one's own count.
  void undo_step() override {
    for (const auto& scheduler : schedulers_) scheduler->undo_step();
  }

  // The constructor refuses a SequentialLR that would be begun.
  void begin() override { step(); }

  void check_groups() const override {
    schedulers_[active(last_epoch_ + 1)]->check_groups();
  }

 private:
  // Returns the index of the scheduler of an epoch.
  size_t active(int64_t epoch) const {
    return static_cast<size_t>(
        std::upper_bound(milestones_.begin(), milestones_.end(), epoch) -
        milestones_.begin());
  }

  void list_state(StateFields& fields) override {
    SchedulerRule::list_state(fields);
    fields.add("last_epoch", last_epoch_);
    fields.add("_milestones", milestones_, milestones_.size());
    list_parts(fields, schedulers_);
  }

  Parts schedulers_;
  std::vector<int64_t> milestones_;
};

class ChainedRule final : public SchedulerRule {
 public:
  ChainedRule(SchedulerGroupsPtr groups,
              const optim::ChainedSchedulerOptions& options)
      : SchedulerRule(std::move(groups), "ChainedScheduler") {
    const std::vector<optim::Schedule>& schedules = options.schedulers;
    if (schedules.empty()) {
      throw std::invalid_argument(
          "ChainedScheduler has no schedulers; give at least one");
    }
    schedulers_ = make_parts(schedules, groups_);
    last_lr_ = groups_->lrs();
  }

  void step() override {
    check_groups();
    for (const auto& scheduler : schedulers_) scheduler->step();
    last_lr_ = groups_->lrs();
  }

  int64_t last_epoch() const override {
    return schedulers_.back()->last_epoch();
  }

  void initial_step() override { step(); }

  void undo_step() override {
    for (const auto& scheduler : schedulers_) scheduler->undo_step();
  }

  // SequentialLR refuses a ChainedScheduler that it would have to begin.
  void begin() override { step(); }

  void check_groups() const override {
    for (const auto& scheduler : schedulers_) scheduler->check_groups();
  }

 private:
  void list_state(StateFields& fields) override {
    SchedulerRule::list_state(fields);
    list_parts(fields, schedulers_);
  }

  Parts schedulers_;
};

}  // namespace
}  // namespace lockstep::internal

namespace lockstep::optim {

Schedule::Schedule(const SequentialLROptions& options)
    : make_(internal::rule_maker<internal::SequentialRule>(options)),
      is_composite_(true) {}
Schedule::Schedule(const ChainedSchedulerOptions& options)
    : make_(internal::rule_maker<internal::ChainedRule>(options)),
      is_composite_(true) {}

}  // namespace lockstep::optim
