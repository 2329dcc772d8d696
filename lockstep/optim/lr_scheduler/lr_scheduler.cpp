#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

#include <stdexcept>
#include <string>

namespace lockstep::optim {

double PerGroup::of(size_t group, size_t groups, const char* option) const {
  if (for_all_) return values_.front();
  if (values_.empty()) {
    throw std::invalid_argument(std::string(option) +
                                " is not given; give one number, or a list "
                                "with one for each parameter group");
  }
  if (values_.size() != groups) {
    throw std::invalid_argument(
        std::string(option) + " has " + std::to_string(values_.size()) +
        " values, but the optimizer has " + std::to_string(groups) +
        " parameter groups; give one number for all, or one for each group");
  }
  return values_[group];
}

void LRScheduler::list_state(internal::StateFields& fields) {
  fields.add("_last_lr", last_lr_, groups_->size());
}

internal::StateFields LRScheduler::state_fields() {
  internal::StateFields fields(name_);
  list_state(fields);
  return fields;
}

StateTree LRScheduler::state_dict() const {
  // The fields refer to members that restoring would write; capturing does not.
  StateTree::Dict dict =
      const_cast<LRScheduler*>(this)->state_fields().capture();
  dict.set("param_groups", groups_->state());
  return dict;
}

std::function<void()> LRScheduler::prepare_load(const StateTree& state) {
  auto fields = state_fields().restore(state);
  auto groups = groups_->prepare_load(
      state.as<StateTree::Dict>()->find("param_groups"), name_);
  return [fields = std::move(fields), groups = std::move(groups)] {
    fields();
    groups();
  };
}

}  // namespace lockstep::optim

namespace lockstep::internal {

void FormulaScheduler::start() {
  adopt_groups();
  initial_step();
}

void FormulaScheduler::check_groups() const {
  const size_t count = groups_->size();
  if (count < base_lrs_.size()) {
    throw std::invalid_argument(
        std::string(name_) + ": the optimizer has " + std::to_string(count) +
        " parameter groups, but it had " + std::to_string(base_lrs_.size()) +
        "; construct the scheduler again after groups were removed");
  }
  for (size_t group = base_lrs_.size(); group < count; ++group) check(group);
}

void FormulaScheduler::adopt_groups() {
  check_groups();
  for (size_t group = base_lrs_.size(); group < groups_->size(); ++group) {
    adopt(group);
    base_lrs_.push_back(base_lr_of(group));
  }
}

void FormulaScheduler::set(const std::vector<double>& rates) {
  for (size_t group = 0; group < rates.size(); ++group) {
    groups_->set_lr(group, rates[group]);
  }
  last_lr_ = groups_->lrs();
}

void FormulaScheduler::step() {
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

void FormulaScheduler::initial_step() {
  step_count_ = 0;
  is_initial_ = true;
  step();
  is_initial_ = false;
}

void FormulaScheduler::begin() {
  adopt_groups();
  last_epoch_ = 0;
  set(first_lr());
}

void FormulaScheduler::list_state(StateFields& fields) {
  LRScheduler::list_state(fields);
  fields.add("base_lrs", base_lrs_, groups_->size());
  fields.add("last_epoch", last_epoch_);
  fields.add("_step_count", step_count_);
  fields.add_constant("_is_initial", false);
  fields.add_constant("_get_lr_called_within_step", false);
}

}  // namespace lockstep::internal
