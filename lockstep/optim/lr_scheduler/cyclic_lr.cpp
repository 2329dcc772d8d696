#include "lockstep/optim/lr_scheduler/cyclic_lr.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace lockstep::optim {
namespace {

CyclicScaleMode scale_mode_of(const CyclicLROptions& options) {
  if (options.scale_fn) return options.scale_mode;
  return options.mode == CyclicMode::exp_range ? CyclicScaleMode::iterations
                                               : CyclicScaleMode::cycle;
}

// Stores `value` as the element of `group`, which is the next one.
void set_next(std::vector<double>& values, size_t group, double value) {
  values.resize(group + 1);
  values[group] = value;
}

}  // namespace

CyclicLR::CyclicLR(internal::SchedulerGroupsPtr groups,
                   const CyclicLROptions& options)
    : FormulaScheduler(std::move(groups), "CyclicLR"),
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
  // As in Python, the first rate is the initial one of the optimizer, which an
  // earlier part of a SequentialLR or ChainedScheduler may have noted.
  start();
  is_constructed_ = true;
  for (size_t group = 0; group < base_lrs_.size(); ++group) {
    base_lrs_[group] = base_lr_of(group);
  }
}

CyclicLR::Ends CyclicLR::ends_of(size_t group) const {
  const auto of = [&](const PerGroup& option, const char* name) {
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

void CyclicLR::check(size_t group) const { ends_of(group); }

void CyclicLR::adopt(size_t group) {
  const Ends ends = ends_of(group);
  if (options_.cycle_momentum) {
    set_next(base_momentums_, group, ends.base_momentum);
    set_next(max_momentums_, group, ends.max_momentum);
    groups_->set_momentum(group, ends.max_momentum);
    groups_->values(group)["max_momentum"] = ends.max_momentum;
    groups_->values(group)["base_momentum"] = ends.base_momentum;
  }
  set_next(max_lrs_, group, ends.max_lr);
  groups_->set_lr(group, ends.base_lr);
}

double CyclicLR::base_lr_of(size_t group) {
  const double initial = groups_->initial_lr(group);
  return is_constructed_
             ? options_.base_lr.of(group, groups_->size(), "CyclicLR: base_lr")
             : initial;
}

double CyclicLR::scale(double cycle) const {
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

std::vector<double> CyclicLR::get_lr() {
  const double cycles = static_cast<double>(last_epoch_) / total_size_;
  const double cycle = std::floor(1 + cycles);
  const double place = 1.0 + cycles - cycle;
  const double height = place <= step_ratio_ ? place / step_ratio_
                                             : (place - 1) / (step_ratio_ - 1);
  const double factor = scale(cycle);
  std::vector<double> rates;
  for (size_t group = 0; group < groups_->size(); ++group) {
    const double base = base_lrs_[group];
    rates.push_back(base + (max_lrs_[group] - base) * height * factor);
    if (!options_.cycle_momentum) continue;
    const double high = max_momentums_[group];
    groups_->set_momentum(
        group, high - (high - base_momentums_[group]) * height * factor);
  }
  return rates;
}

void CyclicLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
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

std::function<void()> CyclicLR::prepare_load(const StateTree& state) {
  auto load = FormulaScheduler::prepare_load(state);
  const auto size_of = [&](const char* name) {
    const StateTree* list = state.as<StateTree::Dict>()->find(name);
    return list ? internal::list_in(*list, name_, name).size() : 0;
  };
  const size_t size = size_of("base_lrs");
  if (size_of("max_lrs") != size ||
      (options_.cycle_momentum && (size_of("base_momentums") != size ||
                                   size_of("max_momentums") != size))) {
    internal::refuse_state(name_, "its lists have different lengths");
  }
  return load;
}

}  // namespace lockstep::optim
