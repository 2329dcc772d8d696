#include "lockstep/optim/lr_scheduler/cyclic_schedulers.h"

#include <cmath>
#include <numbers>
#include <set>
#include <stdexcept>

#include "lockstep/optim/lr_scheduler/scheduler_rule.h"

namespace lockstep::internal {
namespace {

using optim::AnnealStrategy;
using optim::CyclicMode;
using optim::CyclicScaleMode;
using optim::PerGroup;

CyclicScaleMode scale_mode_of(const optim::CyclicLROptions& options) {
  if (options.scale_fn) return options.scale_mode;
  return options.mode == CyclicMode::exp_range ? CyclicScaleMode::iterations
                                               : CyclicScaleMode::cycle;
}

// Stores `value` as the element of `group`, which is the next one.
void set_next(std::vector<double>& values, size_t group, double value) {
  values.resize(group + 1);
  values[group] = value;
}

class CyclicRule final : public FormulaRule {
 public:
  CyclicRule(SchedulerGroupsPtr groups, const optim::CyclicLROptions& options)
      : FormulaRule(std::move(groups), "CyclicLR"),
        options_(options),
        mode_(options.mode),
        gamma_(options.gamma),
        scale_mode_(scale_mode_of(options)) {
    const int64_t up = options.step_size_up;
    const int64_t down = options.step_size_down.value_or(up);
    if (up < 1 || down < 1) {
      throw std::invalid_argument("CyclicLR: step_size_up is " +
                                  std::to_string(up) + " and step_size_down " +
                                  std::to_string(down) +
                                  "; give numbers of at least 1");
    }
    total_size_ = static_cast<double>(up) + static_cast<double>(down);
    step_ratio_ = static_cast<double>(up) / total_size_;
    if (options.cycle_momentum) groups_->require_momentum(name_);
    // As in Python, the first rate is the initial one of the optimizer, which
    // an earlier part of a SequentialLR or ChainedScheduler may have noted.
    start();
    is_constructed_ = true;
    for (size_t group = 0; group < base_lrs_.size(); ++group) {
      base_lrs_[group] = base_lr_of(group);
    }
  }

  std::function<void()> prepare_load(const StateTree& state) override {
    auto load = FormulaRule::prepare_load(state);
    const auto size_of = [&](const char* name) {
      const StateTree* list = state.as<StateTree::Dict>()->find(name);
      return list ? list_in(*list, name_, name).size() : 0;
    };
    const size_t size = size_of("base_lrs");
    if (size_of("max_lrs") != size ||
        (options_.cycle_momentum && (size_of("base_momentums") != size ||
                                     size_of("max_momentums") != size))) {
      refuse_state(name_, "its lists have different lengths");
    }
    return load;
  }

 private:
  // A group's numbers in the options.
  struct Ends {
    double base_lr = 0;
    double max_lr = 0;
    double base_momentum = 0;
    double max_momentum = 0;
  };

  Ends ends_of(size_t group) const {
    const auto of = [&](const PerGroup<double>& option, const char* name) {
      return option.of(group, groups_->size(), name);
    };
    Ends ends;
    ends.base_lr = of(options_.base_lr, "CyclicLR: base_lr");
    ends.max_lr = of(options_.max_lr, "CyclicLR: max_lr");
    if (!options_.cycle_momentum) return ends;
    ends.base_momentum = of(options_.base_momentum, "CyclicLR: base_momentum");
    ends.max_momentum = of(options_.max_momentum, "CyclicLR: max_momentum");
    return ends;
  }

  void check(size_t group) const override { ends_of(group); }

  void adopt(size_t group) override {
    const Ends ends = ends_of(group);
    if (options_.cycle_momentum) {
      set_next(base_momentums_, group, ends.base_momentum);
      set_next(max_momentums_, group, ends.max_momentum);
      groups_->values(group)["max_momentum"] = ends.max_momentum;
      groups_->values(group)["base_momentum"] = ends.base_momentum;
    }
    set_next(max_lrs_, group, ends.max_lr);
    groups_->values(group).try_emplace("initial_lr", ends.base_lr);
  }

  double base_lr_of(size_t group) override {
    const double initial = groups_->initial_lr(group);
    return is_constructed_ ? options_.base_lr.of(group, groups_->size(),
                                                 "CyclicLR: base_lr")
                           : initial;
  }

  double scale(double cycle) const {
    const double number = scale_mode_ == CyclicScaleMode::cycle
                              ? cycle
                              : static_cast<double>(last_epoch_);
    if (options_.scale_fn) return options_.scale_fn(number);
    switch (mode_) {
      case CyclicMode::triangular:
        return 1.0;
      case CyclicMode::triangular2:
        return 1 / std::pow(2.0, number - 1);
      case CyclicMode::exp_range:
        return std::pow(gamma_, number);
    }
    return 1.0;
  }

  std::vector<double> get_lr() override {
    const double cycles = static_cast<double>(last_epoch_) / total_size_;
    const double cycle = std::floor(1 + cycles);
    const double place = 1.0 + cycles - cycle;
    const double height = place <= step_ratio_
                              ? place / step_ratio_
                              : (place - 1) / (step_ratio_ - 1);
    const double factor = scale(cycle);
    std::vector<double> rates;
    momenta_.clear();
    for (size_t group = 0; group < groups_->size(); ++group) {
      const double base = base_lrs_[group];
      rates.push_back(base + (max_lrs_[group] - base) * height * factor);
      if (!options_.cycle_momentum) continue;
      const double high = max_momentums_[group];
      momenta_.push_back(high -
                         (high - base_momentums_[group]) * height * factor);
    }
    return rates;
  }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    const size_t groups = groups_->size();
    fields.add("max_lrs", max_lrs_, groups);
    fields.add("total_size", total_size_);
    fields.add("step_ratio", step_ratio_);
    fields.add("mode", mode_, {"triangular", "triangular2", "exp_range"});
    fields.add("gamma", gamma_);
    fields.add("scale_mode", scale_mode_, {"cycle", "iterations"});
    fields.add_constant("_scale_fn_custom", StateTree());
    fields.add_fixed("cycle_momentum", options_.cycle_momentum);
    if (!options_.cycle_momentum) return;
    fields.add_fixed("use_beta1", groups_->has_beta1());
    fields.add("base_momentums", base_momentums_, groups);
    fields.add("max_momentums", max_momentums_, groups);
  }

  optim::CyclicLROptions options_;
  double total_size_ = 0;
  double step_ratio_ = 0;
  CyclicMode mode_;
  double gamma_;
  CyclicScaleMode scale_mode_;
  bool is_constructed_ = false;
  std::vector<double> max_lrs_;
  std::vector<double> base_momentums_;
  std::vector<double> max_momentums_;
};

int64_t total_steps_of(const optim::OneCycleLROptions& options) {
  if (options.total_steps > 0) return options.total_steps;
  if (options.total_steps == 0 && options.epochs > 0 &&
      options.steps_per_epoch > 0) {
    return options.epochs * options.steps_per_epoch;
  }
  throw std::invalid_argument(
      "OneCycleLR: total_steps is " + std::to_string(options.total_steps) +
      ", epochs " + std::to_string(options.epochs) + " and steps_per_epoch " +
      std::to_string(options.steps_per_epoch) +
      "; give total_steps, or both others, as numbers above 0");
}

class OneCycleRule final : public FormulaRule {
 public:
  OneCycleRule(SchedulerGroupsPtr groups,
               const optim::OneCycleLROptions& options)
      : FormulaRule(std::move(groups), "OneCycleLR"),
        options_(options),
        total_steps_(total_steps_of(options)),
        strategy_(options.anneal_strategy) {
    const double part = options.pct_start;
    if (!(part >= 0 && part <= 1)) {
      throw std::invalid_argument("OneCycleLR: pct_start is " +
                                  std::to_string(part) +
                                  "; give a number from 0 to 1");
    }
    if (options.cycle_momentum) groups_->require_momentum(name_);
    const auto total = static_cast<double>(total_steps_);
    const double first = part * total - 1;
    phases_.push_back(
        {first, "initial_lr", "max_lr", "max_momentum", "base_momentum"});
    if (options.three_phase) {
      phases_.push_back({2 * part * total - 2, "max_lr", "initial_lr",
                         "base_momentum", "max_momentum"});
      phases_.push_back(
          {total - 1, "initial_lr", "min_lr", "max_momentum", "max_momentum"});
    } else {
      phases_.push_back(
          {total - 1, "max_lr", "min_lr", "base_momentum", "max_momentum"});
    }
    start();
  }

 private:
  // The texts are names of a group's numbers (SchedulerGroups::values()).
  struct Phase {
    double end_step = 0;
    std::string start_lr{};
    std::string end_lr{};
    std::string start_momentum{};
    std::string end_momentum{};
  };

  // A group's numbers in the options.
  struct Peaks {
    double max_lr = 0;
    double max_momentum = 0;
    double base_momentum = 0;
  };

  Peaks peaks_of(size_t group) const {
    const size_t count = groups_->size();
    Peaks peaks;
    peaks.max_lr = options_.max_lr.of(group, count, "OneCycleLR: max_lr");
    if (!options_.cycle_momentum) return peaks;
    peaks.max_momentum =
        options_.max_momentum.of(group, count, "OneCycleLR: max_momentum");
    peaks.base_momentum =
        options_.base_momentum.of(group, count, "OneCycleLR: base_momentum");
    return peaks;
  }

  void check(size_t group) const override { peaks_of(group); }

  void adopt(size_t group) override {
    const Peaks peaks = peaks_of(group);
    auto& values = groups_->values(group);
    values["max_lr"] = peaks.max_lr;
    values["initial_lr"] = peaks.max_lr / options_.div_factor;
    values["min_lr"] = values["initial_lr"] / options_.final_div_factor;
    if (!options_.cycle_momentum) return;
    values["max_momentum"] = peaks.max_momentum;
    values["base_momentum"] = peaks.base_momentum;
  }

  double anneal(double from, double to, double part) const {
    if (strategy_ == AnnealStrategy::linear) return (to - from) * part + from;
    const double cosine = std::cos(std::numbers::pi * part) + 1;
    return to + (from - to) / 2.0 * cosine;
  }

  std::vector<double> get_lr() override {
    if (last_epoch_ > total_steps_) {
      throw std::invalid_argument(
          "OneCycleLR: this is step " + std::to_string(last_epoch_) + " of " +
          std::to_string(total_steps_) +
          "; give total_steps as many steps as the training has");
    }
    const auto step = static_cast<double>(last_epoch_);
    double begin = 0;
    size_t index = 0;
    for (; index + 1 < phases_.size() && step > phases_[index].end_step;
         ++index) {
      begin = phases_[index].end_step;
    }
    const Phase& phase = phases_[index];
    if (phase.end_step == begin) {
      throw std::invalid_argument(
          "OneCycleLR: with total_steps " + std::to_string(total_steps_) +
          " and this pct_start a phase begins and ends in step " +
          std::to_string(last_epoch_) + "; give other numbers");
    }
    const double part = (step - begin) / (phase.end_step - begin);
    std::vector<double> rates;
    momenta_.clear();
    for (size_t group = 0; group < groups_->size(); ++group) {
      const auto value = [&](const std::string& name) {
        return groups_->value(group, name);
      };
      rates.push_back(anneal(value(phase.start_lr), value(phase.end_lr), part));
      if (options_.cycle_momentum) {
        momenta_.push_back(anneal(value(phase.start_momentum),
                                  value(phase.end_momentum), part));
      }
    }
    return rates;
  }

  StateTree phases_state() const {
    StateTree::List list;
    for (const Phase& phase : phases_) {
      StateTree::Dict dict;
      dict.set("end_step", phase.end_step);
      dict.set("start_lr", phase.start_lr);
      dict.set("end_lr", phase.end_lr);
      dict.set("start_momentum", phase.start_momentum);
      dict.set("end_momentum", phase.end_momentum);
      list.emplace_back(std::move(dict));
    }
    return list;
  }

  std::vector<Phase> phases_of(const StateTree& state) const {
    std::vector<Phase> phases;
    const auto refuse = [&] {
      refuse_state(name_, "_schedule_phases are not those of a OneCycleLR");
    };
    const std::set<std::string> rates{"initial_lr", "max_lr", "min_lr"};
    const std::set<std::string> momenta{"base_momentum", "max_momentum"};
    for (const StateTree& item : list_in(state, name_, "_schedule_phases")) {
      const auto* dict = item.as<StateTree::Dict>();
      const auto name_in = [&](const char* key,
                               const std::set<std::string>& allowed) {
        const StateTree* found = dict ? dict->find(key) : nullptr;
        const auto* name = found ? found->as<std::string>() : nullptr;
        if (!name || !allowed.contains(*name)) refuse();
        return *name;
      };
      Phase& phase = phases.emplace_back();
      phase.start_lr = name_in("start_lr", rates);
      phase.end_lr = name_in("end_lr", rates);
      phase.start_momentum = name_in("start_momentum", momenta);
      phase.end_momentum = name_in("end_momentum", momenta);
      const StateTree* end = dict->find("end_step");
      if (!end) refuse();
      phase.end_step = number_in(*end, name_, "end_step");
    }
    if (phases.empty()) refuse();
    return phases;
  }

  void list_state(StateFields& fields) override {
    FormulaRule::list_state(fields);
    fields.add("total_steps", total_steps_, 1);
    fields.add("_anneal_func_type", strategy_, {"cos", "linear"});
    fields.add(
        "_schedule_phases", [this] { return phases_state(); },
        [this](const StateTree& state) -> std::function<void()> {
          return [this, phases = phases_of(state)]() mutable {
            phases_ = std::move(phases);
          };
        });
    fields.add_fixed("cycle_momentum", options_.cycle_momentum);
    if (options_.cycle_momentum) {
      fields.add_fixed("use_beta1", groups_->has_beta1());
    }
  }

  optim::OneCycleLROptions options_;
  int64_t total_steps_;
  AnnealStrategy strategy_;
  std::vector<Phase> phases_;
};

}  // namespace
}  // namespace lockstep::internal

namespace lockstep::optim {

Schedule::Schedule(const CyclicLROptions& options)
    : make_(internal::rule_maker<internal::CyclicRule>(options)) {}
Schedule::Schedule(const OneCycleLROptions& options)
    : make_(internal::rule_maker<internal::OneCycleRule>(options)) {}

}  // namespace lockstep::optim
