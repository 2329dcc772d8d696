#include "lockstep/optim/lr_scheduler/constant_lr.h"

#include <stdexcept>
#include <string>

namespace lockstep::optim {

ConstantLR::ConstantLR(internal::SchedulerGroupsPtr groups,
                       const ConstantLROptions& options)
    : FormulaScheduler(std::move(groups), "ConstantLR"),
      factor_(options.factor),
      total_iters_(options.total_iters) {
  if (!(factor_ > 0 && factor_ <= 1)) {
    throw std::invalid_argument("ConstantLR: factor is " +
                                std::to_string(factor_) +
                                "; give a number above 0, at most 1");
  }
  start();
}

std::vector<double> ConstantLR::get_lr() {
  if (last_epoch_ == 0) {
    return from_present([&](double lr) { return lr * factor_; });
  }
  if (last_epoch_ != total_iters_) return groups_->lrs();
  return from_present([&](double lr) { return lr * (1.0 / factor_); });
}

std::vector<double> ConstantLR::first_lr() {
  const double over = total_iters_ <= 0 ? 1 : 0;
  return from_initial(
      [&](double lr) { return lr * (factor_ + over * (1 - factor_)); });
}

void ConstantLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
  fields.add("factor", factor_);
  fields.add("total_iters", total_iters_);
}

}  // namespace lockstep::optim
