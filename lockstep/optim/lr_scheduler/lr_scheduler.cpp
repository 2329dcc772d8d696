#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

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
