#include "lockstep/optim/lr_scheduler/swalr.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <string>

#include "lockstep/optim/lr_scheduler/scheduler_rule.h"

namespace lockstep::internal {
namespace {

class SWARule final : public FormulaRule {
 public:
  SWARule(SchedulerGroupsPtr groups, const optim::SWALROptions& options)
      : FormulaRule(std::move(groups), "SWALR"),
        swa_lr_(options.swa_lr),
        anneal_epochs_(options.anneal_epochs),
        strategy_(options.anneal_strategy) {
    if (anneal_epochs_ < 0) {
      throw std::invalid_argument("SWALR: anneal_epochs is " +
                                  std::to_string(anneal_epochs_) +
                                  "; give a number of epochs, 0 or more");
    }
    start();
  }

 private:
  double swa_lr_of(size_t group) const {
    return swa_lr_.of(group, groups_->size(), "SWALR: swa_lr");
  }

  void check(size_t group) const override { swa_lr_of(group); }

  void adopt(size_t group) override {
    groups_->values(group)["swa_lr"] = swa_lr_of(group);
  }

  // Returns the part of the way, from 0 to 1, that is gone after `step` steps.
  double annealed(int64_t step) const {
    const auto epochs =
        static_cast<double>(std::max(int64_t{1}, anneal_epochs_));
    const double part =
        std::max(0.0, std::min(1.0, static_cast<double>(step) / epochs));
    if (strategy_ == optim::AnnealStrategy::linear) return part;
    return (1 - std::cos(std::numbers::pi * part)) / 2;
  }

  std::vector<double> get_lr() override {
    int64_t step = step_count_ - 1;
    if (anneal_epochs_ == 0) step = std::max(int64_t{1}, step);
    const double before = annealed(step - 1);
    const double now = annealed(step);
    std::vector<double> rates = groups_->lrs();
    for (size_t group = 0; group < rates.size(); ++group) {
      const double goal = groups_->value(group, "swa_lr");
      // The present rate is `before` of the way from this one to the goal.
      const double from =
          before == 1 ? goal : (rates[group] - before * goal) / (1 - before);
      rates[group] = goal * now + from * (1 - now);
    }
    return rates;
  }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("anneal_epochs", anneal_epochs_, 0);
    fields.add("_anneal_strategy", strategy_, {"cos", "linear"});
  }

  optim::PerGroup<double> swa_lr_;
  int64_t anneal_epochs_;
  optim::AnnealStrategy strategy_;
};

}  // namespace
}  // namespace lockstep::internal

namespace lockstep::optim {

Schedule::Schedule(const SWALROptions& options)
    : make_(internal::rule_maker<internal::SWARule>(options)) {}

}  // namespace lockstep::optim
