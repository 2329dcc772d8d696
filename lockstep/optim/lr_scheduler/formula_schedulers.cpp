#include "lockstep/optim/lr_scheduler/formula_schedulers.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "lockstep/comm/init.h"
#include "lockstep/optim/lr_scheduler/scheduler_rule.h"

namespace lockstep::internal {
namespace {

class ConstantRule final : public FormulaRule {
 public:
  ConstantRule(SchedulerGroupsPtr groups,
               const optim::ConstantLROptions& options)
      : FormulaRule(std::move(groups), "ConstantLR"),
        factor_(options.factor),
        total_iters_(options.total_iters) {
    if (!(factor_ > 0 && factor_ <= 1)) {
      throw std::invalid_argument("ConstantLR: factor is " +
                                  std::to_string(factor_) +
                                  "; give a number above 0, at most 1");
    }
    start();
  }

 private:
  std::vector<double> get_lr() override {
    if (last_epoch_ == 0) {
      return from_present([&](double lr) { return lr * factor_; });
    }
    if (last_epoch_ != total_iters_) return groups_->lrs();
    return from_present([&](double lr) { return lr * (1.0 / factor_); });
  }

  std::vector<double> first_lr() override {
    const double over = total_iters_ <= 0 ? 1 : 0;
    return from_initial(
        [&](double lr) { return lr * (factor_ + over * (1 - factor_)); });
  }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("factor", factor_);
    fields.add("total_iters", total_iters_);
  }

  double factor_;
  int64_t total_iters_;
};

class LinearRule final : public FormulaRule {
 public:
  LinearRule(SchedulerGroupsPtr groups, const optim::LinearLROptions& options)
      : FormulaRule(std::move(groups), "LinearLR"),
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

 private:
  std::vector<double> get_lr() override {
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

  std::vector<double> first_lr() override {
    return from_initial([&](double lr) { return lr * start_factor_; });
  }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("start_factor", start_factor_);
    fields.add("end_factor", end_factor_);
    fields.add("total_iters", total_iters_);
  }

  double start_factor_;
  double end_factor_;
  int64_t total_iters_;
};

class PolynomialRule final : public FormulaRule {
 public:
  PolynomialRule(SchedulerGroupsPtr groups,
                 const optim::PolynomialLROptions& options)
      : FormulaRule(std::move(groups), "PolynomialLR"),
        total_iters_(options.total_iters),
        power_(options.power) {
    start();
  }

 private:
  std::vector<double> get_lr() override {
    if (is_initial_ || last_epoch_ > total_iters_) return groups_->lrs();
    const auto total = static_cast<double>(total_iters_);
    const double left = 1.0 - static_cast<double>(last_epoch_) / total;
    const double before = 1.0 - static_cast<double>(last_epoch_ - 1) / total;
    const double decay = std::pow(left / before, power_);
    return from_present([&](double lr) { return lr * decay; });
  }

  std::vector<double> first_lr() override { return base_lrs_; }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("total_iters", total_iters_);
    fields.add("power", power_);
  }

  int64_t total_iters_;
  double power_;
};

class ExponentialRule final : public FormulaRule {
 public:
  ExponentialRule(SchedulerGroupsPtr groups,
                  const optim::ExponentialLROptions& options)
      : FormulaRule(std::move(groups), "ExponentialLR"), gamma_(options.gamma) {
    start();
  }

 private:
  std::vector<double> get_lr() override {
    if (is_initial_) return groups_->lrs();
    return from_present([&](double lr) { return lr * gamma_; });
  }

  std::vector<double> first_lr() override { return base_lrs_; }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("gamma", gamma_);
  }

  double gamma_;
};

class StepRule final : public FormulaRule {
 public:
  StepRule(SchedulerGroupsPtr groups, const optim::StepLROptions& options)
      : FormulaRule(std::move(groups), "StepLR"),
        step_size_(options.step_size),
        gamma_(options.gamma) {
    if (step_size_ < 1) {
      throw std::invalid_argument("StepLR: step_size is " +
                                  std::to_string(step_size_) +
                                  "; give a number of epochs, at least 1");
    }
    start();
  }

 private:
  std::vector<double> get_lr() override {
    if (last_epoch_ == 0 || last_epoch_ % step_size_ != 0)
      return groups_->lrs();
    return from_present([&](double lr) { return lr * gamma_; });
  }

  std::vector<double> first_lr() override { return base_lrs_; }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("step_size", step_size_, 1);
    fields.add("gamma", gamma_);
  }

  int64_t step_size_;
  double gamma_;
};

class MultiStepRule final : public FormulaRule {
 public:
  MultiStepRule(SchedulerGroupsPtr groups,
                const optim::MultiStepLROptions& options)
      : FormulaRule(std::move(groups), "MultiStepLR"), gamma_(options.gamma) {
    const std::vector<int64_t>& milestones = options.milestones;
    for (const int64_t milestone : milestones) ++milestones_[milestone];
    start();
  }

 private:
  std::vector<double> get_lr() override {
    const auto found = milestones_.find(last_epoch_);
    if (found == milestones_.end()) return groups_->lrs();
    const double factor = std::pow(gamma_, static_cast<double>(found->second));
    return from_present([&](double lr) { return lr * factor; });
  }

  std::vector<double> first_lr() override {
    int64_t reached = 0;
    for (const auto& [milestone, count] : milestones_) {
      if (milestone <= 0) reached += count;
    }
    const double factor = std::pow(gamma_, static_cast<double>(reached));
    return from_initial([&](double lr) { return lr * factor; });
  }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("milestones", milestones_);
    fields.add("gamma", gamma_);
  }

  StateTree::Counter milestones_;
  double gamma_;
};

}  // namespace
}  // namespace lockstep::internal

namespace lockstep::optim {

Schedule::Schedule(const ConstantLROptions& options)
    : make_(internal::rule_maker<internal::ConstantRule>(options)) {}
Schedule::Schedule(const LinearLROptions& options)
    : make_(internal::rule_maker<internal::LinearRule>(options)) {}
Schedule::Schedule(const PolynomialLROptions& options)
    : make_(internal::rule_maker<internal::PolynomialRule>(options)) {}
Schedule::Schedule(const ExponentialLROptions& options)
    : make_(internal::rule_maker<internal::ExponentialRule>(options)) {}
Schedule::Schedule(const StepLROptions& options)
    : make_(internal::rule_maker<internal::StepRule>(options)) {}
Schedule::Schedule(const MultiStepLROptions& options)
    : make_(internal::rule_maker<internal::MultiStepRule>(options)) {}

LinearLROptions scale_lr_linearly(torch::optim::Optimizer& optimizer,
                                  const LinearScalingOptions& options) {
  if (!(options.scale >= 0) || !std::isfinite(options.scale) ||
      options.warmup_iters < 1) {
    throw std::invalid_argument(
        "scale_lr_linearly: scale is " + std::to_string(options.scale) +
        " and warmup_iters " + std::to_string(options.warmup_iters) +
        "; give a scale above 0 (or 0 for the world size) and at least 1 "
        "step of warm-up");
  }
  const double world = is_initialized() ? get_world_size() : 1;
  const double scale = options.scale > 0 ? options.scale : world;
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(group.options().get_lr() * scale);
  }
  return {.start_factor = std::min(1.0, 1 / scale),
          .end_factor = 1,
          .total_iters = options.warmup_iters};
}

}  // namespace lockstep::optim
