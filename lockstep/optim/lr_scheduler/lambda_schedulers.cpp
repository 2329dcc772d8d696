#include "lockstep/optim/lr_scheduler/lambda_schedulers.h"

#include <stdexcept>
#include <string>

#include "lockstep/optim/lr_scheduler/scheduler_rule.h"

namespace lockstep::internal {
namespace {

class LambdaRule final : public FormulaRule {
 public:
  LambdaRule(SchedulerGroupsPtr groups, const optim::LambdaLROptions& options)
      : LambdaRule(std::move(groups), "LambdaLR", "LambdaLR: lr_lambda",
                   options.lr_lambda) {}
  LambdaRule(SchedulerGroupsPtr groups,
             const optim::MultiplicativeLROptions& options)
      : LambdaRule(std::move(groups), "MultiplicativeLR",
                   "MultiplicativeLR: lr_lambda", options.lr_lambda,
                   /*multiplies=*/true) {}

 private:
  LambdaRule(SchedulerGroupsPtr groups, const char* name, const char* option,
             const optim::PerGroup<optim::LRLambda>& lambdas,
             bool multiplies = false)
      : FormulaRule(std::move(groups), name),
        option_(option),
        lambdas_(lambdas),
        multiplies_(multiplies) {
    start();
  }

  std::vector<double> get_lr() override {
    std::vector<double> rates = multiplies_ ? groups_->lrs() : base_lrs_;
    if (multiplies_ && is_initial_) return rates;
    for (size_t group = 0; group < rates.size(); ++group) {
      rates[group] *= lambda_of(group)(last_epoch_);
    }
    return rates;
  }

  const optim::LRLambda& lambda_of(size_t group) const {
    return lambdas_.of(group, groups_->size(), option_);
  }

  void check(size_t group) const override {
    if (lambda_of(group)) return;
    throw std::invalid_argument(
        std::string(option_) +
        " is not given; give a function from the epoch to a factor, or a list "
        "with one for each parameter group");
  }

  // Adds Python's `lr_lambdas`, which has None for each function: functions are
  // not saved.
  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add(
        "lr_lambdas",
        [groups = groups_->size()] {
          return StateTree(StateTree::List(groups));
        },
        [](const StateTree&) -> std::function<void()> { return [] {}; });
  }

  const char* option_;
  optim::PerGroup<optim::LRLambda> lambdas_;
  bool multiplies_;
};

}  // namespace
}  // namespace lockstep::internal

namespace lockstep::optim {

Schedule::Schedule(const LambdaLROptions& options)
    : make_(internal::rule_maker<internal::LambdaRule>(options)) {}
Schedule::Schedule(const MultiplicativeLROptions& options)
    : make_(internal::rule_maker<internal::LambdaRule>(options)) {}

}  // namespace lockstep::optim
