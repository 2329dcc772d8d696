#include "lockstep/optim/lr_scheduler/exponential_lr.h"

#include <stdexcept>

namespace lockstep::optim {

ExponentialLR::ExponentialLR(internal::SchedulerGroupsPtr groups,
                             const ExponentialLROptions& options)
    : FormulaScheduler(std::move(groups), "ExponentialLR"),
      gamma_(options.gamma.value_or(0)) {
  if (!options.gamma) {
    throw std::invalid_argument(
        "ExponentialLR: gamma is not given; give the factor of each epoch, "
        "such as 0.95");
  }
  start();
}

std::vector<double> ExponentialLR::get_lr() {
  if (is_initial_) return groups_->lrs();
  return from_present([&](double lr) { return lr * gamma_; });
}

std::vector<double> ExponentialLR::first_lr() { return base_lrs_; }

void ExponentialLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
  fields.add("gamma", gamma_);
}

}  // namespace lockstep::optim
