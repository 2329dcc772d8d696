#include "lockstep/optim/lr_scheduler/linear_lr.h"

#include <stdexcept>
#include <string>

namespace lockstep::optim {

LinearLR::LinearLR(internal::SchedulerGroupsPtr groups,
                   const LinearLROptions& options)
    : FormulaScheduler(std::move(groups), "LinearLR"),
      start_factor_(options.start_factor),
      end_factor_(options.end_factor),
      total_iters_(options.total_iters) {
  if (!(start_factor_ > 0 && start_factor_ <= 1)) {
    throw std::invalid_argument("LinearLR: start_factor is " +
                                std::to_string(start_factor_) +
                                "; give a number above 0, at most 1");
  }
  if (!(end_factor_ >= 0 && end_factor_ <= 1)) {
    throw std::invalid_argument("LinearLR: end_factor is " +
                                std::to_string(end_factor_) +
                                "; give a number from 0 to 1");
  }
  start();
}

std::vector<double> LinearLR::get_lr() {
  if (last_epoch_ == 0) {
    return from_present([&](double lr) { return lr * start_factor_; });
  }
  if (is_initial_ || last_epoch_ > total_iters_) return groups_->lrs();
  const double difference = end_factor_ - start_factor_;
  const double factor =
      1.0 + difference / (static_cast<double>(total_iters_) * start_factor_ +
                          static_cast<double>(last_epoch_ - 1) * difference);
  return from_present([&](double lr) { return lr * factor; });
}

std::vector<double> LinearLR::first_lr() {
  return from_initial([&](double lr) { return lr * start_factor_; });
}

void LinearLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
  fields.add("start_factor", start_factor_);
  fields.add("end_factor", end_factor_);
  fields.add("total_iters", total_iters_);
}

}  // namespace lockstep::optim
