#include "lockstep/optim/lr_scheduler/step_lr.h"

#include <stdexcept>
#include <string>

namespace lockstep::optim {

StepLR::StepLR(internal::SchedulerGroupsPtr groups,
               const StepLROptions& options)
    : FormulaScheduler(std::move(groups), "StepLR"),
      step_size_(options.step_size),
      gamma_(options.gamma) {
  if (step_size_ < 1) {
    throw std::invalid_argument("StepLR: step_size is " +
                                std::to_string(step_size_) +
                                "; give a number of epochs, at least 1");
  }
  start();
}

std::vector<double> StepLR::get_lr() {
  if (last_epoch_ == 0 || last_epoch_ % step_size_ != 0) return groups_->lrs();
  return from_present([&](double lr) { return lr * gamma_; });
}

std::vector<double> StepLR::first_lr() { return base_lrs_; }

void StepLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
  fields.add("step_size", step_size_, 1);
  fields.add("gamma", gamma_);
}

}  // namespace lockstep::optim
