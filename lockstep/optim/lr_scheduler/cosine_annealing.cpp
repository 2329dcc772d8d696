#include "lockstep/optim/lr_scheduler/cosine_annealing.h"

#include <cmath>
#include <numbers>
#include <stdexcept>
#include <string>
#include <tuple>

#include "lockstep/optim/lr_scheduler/scheduler_rule.h"

namespace lockstep::internal {
namespace {

class CosineAnnealingRule final : public FormulaRule {
 public:
  CosineAnnealingRule(SchedulerGroupsPtr groups,
                      const optim::CosineAnnealingLROptions& options)
      : FormulaRule(std::move(groups), "CosineAnnealingLR"),
        t_max_(options.T_max),
        eta_min_(options.eta_min) {
    if (t_max_ < 1) {
      throw std::invalid_argument("CosineAnnealingLR: T_max is " +
                                  std::to_string(t_max_) +
                                  "; give a number of epochs, at least 1");
    }
    start();
  }

 private:
  std::vector<double> get_lr() override {
    using std::numbers::pi;
    if (is_initial_) return groups_->lrs();
    const auto t_max = static_cast<double>(t_max_);
    const auto epoch = static_cast<double>(last_epoch_);
    // Where the factor below would divide by 0 the rates begin to rise.
    if ((last_epoch_ - 1 - t_max_) % (2 * t_max_) == 0) {
      std::vector<double> rates = groups_->lrs();
      for (size_t group = 0; group < rates.size(); ++group) {
        rates[group] +=
            (base_lrs_[group] - eta_min_) * (1 - std::cos(pi / t_max)) / 2;
      }
      return rates;
    }
    const double factor = (1 + std::cos(pi * epoch / t_max)) /
                          (1 + std::cos(pi * (epoch - 1) / t_max));
    return from_present(
        [&](double lr) { return factor * (lr - eta_min_) + eta_min_; });
  }

  std::vector<double> first_lr() override {
    // This is not the initial rate bit for bit.
    return from_initial(
        [&](double lr) { return eta_min_ + (lr - eta_min_) * (1 + 1) / 2; });
  }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("T_max", t_max_, 1);
    fields.add("eta_min", eta_min_);
  }

  int64_t t_max_;
  double eta_min_;
};

class CosineAnnealingWarmRestartsRule final : public FormulaRule {
 public:
  CosineAnnealingWarmRestartsRule(
      SchedulerGroupsPtr groups,
      const optim::CosineAnnealingWarmRestartsOptions& options)
      : FormulaRule(std::move(groups), "CosineAnnealingWarmRestarts"),
        t_0_(options.T_0),
        t_mult_(options.T_mult),
        eta_min_(options.eta_min),
        t_i_(options.T_0) {
    if (t_0_ < 1 || t_mult_ < 1) {
      throw std::invalid_argument("CosineAnnealingWarmRestarts: T_0 is " +
                                  std::to_string(t_0_) + " and T_mult " +
                                  std::to_string(t_mult_) +
                                  "; give integers of at least 1");
    }
    start();
  }

  void step() override {
    adopt_groups();
    const auto before = std::tuple(last_epoch_, t_cur_, t_i_);
    if (last_epoch_ < 0) {
      last_epoch_ = 0;
      t_cur_ = 0;
      t_i_ = t_0_;
    } else {
      ++last_epoch_;
      ++t_cur_;
      if (t_cur_ >= t_i_) {
        t_cur_ %= t_i_;
        t_i_ = t_i_ > StateFields::kMost / t_mult_ ? StateFields::kMost
                                                   : t_i_ * t_mult_;
      }
    }
    try {
      set(get_lr());
    } catch (...) {
      std::tie(last_epoch_, t_cur_, t_i_) = before;
      throw;
    }
  }

 private:
  std::vector<double> get_lr() override {
    const double angle = std::numbers::pi * static_cast<double>(t_cur_) /
                         static_cast<double>(t_i_);
    return from_initial([&](double lr) {
      return eta_min_ + (lr - eta_min_) * (1 + std::cos(angle)) / 2;
    });
  }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("T_0", t_0_, 1);
    fields.add("T_mult", t_mult_, 1);
    fields.add("eta_min", eta_min_);
    fields.add("T_i", t_i_, 1);
    fields.add("T_cur", t_cur_);
  }

  int64_t t_0_;
  int64_t t_mult_;
  double eta_min_;
  int64_t t_i_;         // epochs of the present period
  int64_t t_cur_ = -1;  // epochs since its beginning
};

}  // namespace
}  // namespace lockstep::internal

namespace lockstep::optim {

Schedule::Schedule(const CosineAnnealingLROptions& options)
    : make_(internal::rule_maker<internal::CosineAnnealingRule>(options)) {}
Schedule::Schedule(const CosineAnnealingWarmRestartsOptions& options)
    : make_(internal::rule_maker<internal::CosineAnnealingWarmRestartsRule>(
          options)) {}

}  // namespace lockstep::optim
