#include "lockstep/optim/lr_scheduler/one_cycle_lr.h"

#include <cmath>
#include <numbers>
#include <set>
#include <stdexcept>

namespace lockstep::optim {
namespace {

int64_t total_steps_of(const OneCycleLROptions& options) {
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

}  // namespace

OneCycleLR::OneCycleLR(internal::SchedulerGroupsPtr groups,
                       const OneCycleLROptions& options)
    : FormulaScheduler(std::move(groups), "OneCycleLR"),
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

OneCycleLR::Peaks OneCycleLR::peaks_of(size_t group) const {
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

void OneCycleLR::check(size_t group) const { peaks_of(group); }

void OneCycleLR::adopt(size_t group) {
  const Peaks peaks = peaks_of(group);
  auto& values = groups_->values(group);
  values["max_lr"] = peaks.max_lr;
  values["initial_lr"] = peaks.max_lr / options_.div_factor;
  values["min_lr"] = values["initial_lr"] / options_.final_div_factor;
  if (!options_.cycle_momentum) return;
  values["max_momentum"] = peaks.max_momentum;
  values["base_momentum"] = peaks.base_momentum;
  groups_->set_momentum(group, peaks.max_momentum);
}

double OneCycleLR::anneal(double from, double to, double part) const {
  if (strategy_ == AnnealStrategy::linear) return (to - from) * part + from;
  const double cosine = std::cos(std::numbers::pi * part) + 1;
  return to + (from - to) / 2.0 * cosine;
}

std::vector<double> OneCycleLR::get_lr() {
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
  for (size_t group = 0; group < groups_->size(); ++group) {
    const auto value = [&](const std::string& name) {
      return groups_->value(group, name);
    };
    rates.push_back(anneal(value(phase.start_lr), value(phase.end_lr), part));
    if (options_.cycle_momentum) {
      groups_->set_momentum(group, anneal(value(phase.start_momentum),
                                          value(phase.end_momentum), part));
    }
  }
  return rates;
}

StateTree OneCycleLR::phases_state() const {
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

std::vector<OneCycleLR::Phase> OneCycleLR::phases_of(
    const StateTree& state) const {
  std::vector<Phase> phases;
  const auto refuse = [&] {
    internal::refuse_state(name_,
                           "_schedule_phases are not those of a OneCycleLR");
  };
  const std::set<std::string> rates{"initial_lr", "max_lr", "min_lr"};
  const std::set<std::string> momenta{"base_momentum", "max_momentum"};
  for (const StateTree& item :
       internal::list_in(state, name_, "_schedule_phases")) {
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
    phase.end_step = internal::number_in(*end, name_, "end_step");
  }
  if (phases.empty()) refuse();
  return phases;
}

void OneCycleLR::list_state(internal::StateFields& fields) {
  FormulaScheduler::list_state(fields);
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

}  // namespace lockstep::optim
