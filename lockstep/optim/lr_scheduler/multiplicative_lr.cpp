#include "lockstep/optim/lr_scheduler/multiplicative_lr.h"

namespace lockstep::optim {

MultiplicativeLR::MultiplicativeLR(internal::SchedulerGroupsPtr groups,
                                   const MultiplicativeLROptions& options)
    : FormulaScheduler(std::move(groups), "MultiplicativeLR"),
      lambdas_(options.lr_lambda) {
  lambdas_.require(groups_->size(), name_);
  start();
}

std::vector<double> MultiplicativeLR::get_lr() {
  std::vector<double> rates = groups_->lrs();
  if (is_initial_) return rates;
  for (size_t group = 0; group < rates.size(); ++group) {
    rates[group] *= lambdas_.factor(group, last_epoch_);
  }
  return rates;
}

void MultiplicativeLR::check(size_t) const {
  lambdas_.require(groups_->size(), name_);
}

void MultiplicativeLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
  internal::LRLambdas::list_state(fields, groups_->size());
}

}  // namespace lockstep::optim
