#include "lockstep/optim/lr_scheduler/polynomial_lr.h"

#include <cmath>

namespace lockstep::optim {

PolynomialLR::PolynomialLR(internal::SchedulerGroupsPtr groups,
                           const PolynomialLROptions& options)
    : FormulaScheduler(std::move(groups), "PolynomialLR"),
      total_iters_(options.total_iters),
      power_(options.power) {
  start();
}

std::vector<double> PolynomialLR::get_lr() {
  if (is_initial_ || last_epoch_ > total_iters_) return groups_->lrs();
  const auto total = static_cast<double>(total_iters_);
  const double left = 1.0 - static_cast<double>(last_epoch_) / total;
  const double before = 1.0 - static_cast<double>(last_epoch_ - 1) / total;
  const double decay = std::pow(left / before, power_);
  return from_present([&](double lr) { return lr * decay; });
}

std::vector<double> PolynomialLR::first_lr() { return base_lrs_; }

void PolynomialLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
  fields.add("total_iters", total_iters_);
  fields.add("power", power_);
}

}  // namespace lockstep::optim
