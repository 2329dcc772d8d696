#include "lockstep/optim/lr_scheduler/lambda_lr.h"

namespace lockstep::optim {

LambdaLR::LambdaLR(internal::SchedulerGroupsPtr groups,
                   const LambdaLROptions& options)
    : FormulaScheduler(std::move(groups), "LambdaLR"),
      lambdas_(options.lr_lambda) {
  lambdas_.require(groups_->size(), name_);
  start();
}

std::vector<double> LambdaLR::get_lr() {
  std::vector<double> rates = base_lrs_;
  for (size_t group = 0; group < rates.size(); ++group) {
    rates[group] *= lambdas_.factor(group, last_epoch_);
  }
  return rates;
}

void LambdaLR::check(size_t) const { lambdas_.require(groups_->size(), name_); }

void LambdaLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
  internal::LRLambdas::list_state(fields, groups_->size());
}

}  // namespace lockstep::optim
