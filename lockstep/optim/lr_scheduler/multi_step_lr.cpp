#include "lockstep/optim/lr_scheduler/multi_step_lr.h"

#include <cmath>

namespace lockstep::optim {

MultiStepLR::MultiStepLR(internal::SchedulerGroupsPtr groups,
                         const MultiStepLROptions& options)
    : FormulaScheduler(std::move(groups), "MultiStepLR"),
      gamma_(options.gamma) {
  for (const int64_t milestone : options.milestones) ++milestones_[milestone];
  start();
}

std::vector<double> MultiStepLR::get_lr() {
  const auto found = milestones_.find(last_epoch_);
  if (found == milestones_.end()) return groups_->lrs();
  const double factor = std::pow(gamma_, static_cast<double>(found->second));
  return from_present([&](double lr) { return lr * factor; });
}

std::vector<double> MultiStepLR::first_lr() {
  int64_t reached = 0;
  for (const auto& [milestone, count] : milestones_) {
    if (milestone <= 0) reached += count;
  }
  const double factor = std::pow(gamma_, static_cast<double>(reached));
  return from_initial([&](double lr) { return lr * factor; });
}

void MultiStepLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
  fields.add("milestones", milestones_);
  fields.add("gamma", gamma_);
}

}  // namespace lockstep::optim
