#include "lockstep/optim/lr_scheduler/lambda_schedulers.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lockstep::internal {

void LRLambdas::require(size_t groups, const char* scheduler) const {
  const bool empty = std::any_of(functions_.begin(), functions_.end(),
                                 [](const Function& f) { return !f; });
  if (functions_.empty() || empty) {
    throw std::invalid_argument(
        std::string(scheduler) +
        ": lr_lambda is not given; give a function from the epoch to a factor, "
        "or a list with one for each parameter group");
  }
  if (!for_all_ && functions_.size() != groups) {
    throw std::invalid_argument(
        std::string(scheduler) + ": lr_lambda has " +
        std::to_string(functions_.size()) +
        " functions, but the optimizer has " + std::to_string(groups) +
        " parameter groups; give one function for all, or one for each group");
  }
}

void LRLambdas::list_state(StateFields& fields, size_t groups) {
  fields.add(
      "lr_lambdas", [groups] { return StateTree(StateTree::List(groups)); },
      [](const StateTree&) -> std::function<void()> { return [] {}; });
}

}  // namespace lockstep::internal

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
