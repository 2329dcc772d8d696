#include "lockstep/optim/lr_scheduler/scheduler_rule.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace lockstep::internal {

void SchedulerRule::list_state(StateFields& fields) {
  fields.add("_last_lr", last_lr_, groups_->size());
}

StateFields SchedulerRule::state_fields() {
  StateFields fields(name_);
  list_state(fields);
  return fields;
}

StateTree SchedulerRule::state_dict() const {
  // The fields refer to members that restoring would write; capturing does not.
  StateTree::Dict dict =
      const_cast<SchedulerRule*>(this)->state_fields().capture();
  dict.set("param_groups", groups_->state());
  return dict;
}

std::function<void()> SchedulerRule::prepare_load(const StateTree& state) {
  auto fields = state_fields().restore(state);
  auto groups = groups_->prepare_load(
      state.as<StateTree::Dict>()->find("param_groups"), name_);
  return [fields = std::move(fields), groups = std::move(groups)] {
    fields();
    groups();
  };
}

void FormulaRule::start() {
  adopt_groups();
  initial_step();
}

void FormulaRule::check_groups() const {
  const size_t count = groups_->size();
  if (count < base_lrs_.size()) {
    throw std::invalid_argument(
        std::string(name_) + ": the optimizer has " + std::to_string(count) +
        " parameter groups, but it had " + std::to_string(base_lrs_.size()) +
        "; construct the scheduler again after groups were removed");
  }
  for (size_t group = base_lrs_.size(); group < count; ++group) check(group);
}

void FormulaRule::adopt_groups() {
  check_groups();
  for (size_t group = base_lrs_.size(); group < groups_->size(); ++group) {
    adopt(group);
    base_lrs_.push_back(base_lr_of(group));
  }
}

void FormulaRule::set(const std::vector<double>& rates) {
  // The constructors check most options. This finds the others that make no
  // sense, such as a factor that is not a number.
  for (const double rate : rates) {
    if (std::isfinite(rate)) continue;
    throw std::invalid_argument(std::string(name_) + ": the learning rate of " +
                                "step " + std::to_string(last_epoch_) +
                                " would be " + std::to_string(rate) +
                                "; give options, and an optimizer's learning "
                                "rate, that make it a number");
  }
  for (size_t group = 0; group < rates.size(); ++group) {
    groups_->set_lr(group, rates[group]);
  }
  for (size_t group = 0; group < momenta_.size(); ++group) {
    groups_->set_momentum(group, momenta_[group]);
  }
  last_lr_ = groups_->lrs();
}

void FormulaRule::step() {
  adopt_groups();
  ++last_epoch_;
  ++step_count_;
  try {
    set(get_lr());
  } catch (...) {
    --last_epoch_;
    --step_count_;
    throw;
  }
}

void FormulaRule::initial_step() {
  step_count_ = 0;
  is_initial_ = true;
  step();
  is_initial_ = false;
}

void FormulaRule::begin() {
  adopt_groups();
  const int64_t before = std::exchange(last_epoch_, 0);
  try {
    set(first_lr());
  } catch (...) {
    last_epoch_ = before;
    throw;
  }
}

void FormulaRule::list_state(StateFields& fields) {
  SchedulerRule::list_state(fields);
  fields.add("base_lrs", base_lrs_, groups_->size());
  fields.add("last_epoch", last_epoch_);
  fields.add("_step_count", step_count_);
  fields.add_constant("_is_initial", false);
  fields.add_constant("_get_lr_called_within_step", false);
}

}  // namespace lockstep::internal
