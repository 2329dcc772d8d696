#include "lockstep/optim/lr_scheduler/scheduler_groups.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <stdexcept>
#include <tuple>

#include "lockstep/optim/lr_scheduler/state_fields.h"
#include "lockstep/state/scheduler_values.h"

namespace lockstep::internal {
namespace {

using torch::optim::OptimizerOptions;

// Calls `change` with the momentum or beta1 in `options`; returns false if
// there is neither.
template <class Change>
bool change_momentum(OptimizerOptions& options, const Change& change) {
  if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) {
    change(sgd->momentum(), false);
  } else if (auto* rms =
                 dynamic_cast<torch::optim::RMSpropOptions*>(&options)) {
    change(rms->momentum(), false);
  } else if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) {
    change(std::get<0>(adam->betas()), true);
  } else if (auto* adamw =
                 dynamic_cast<torch::optim::AdamWOptions*>(&options)) {
    change(std::get<0>(adamw->betas()), true);
  } else {
    return false;
  }
  return true;
}

}  // namespace

double SchedulerGroups::lr(size_t group) const {
  return optimizer_.param_groups()[group].options().get_lr();
}

std::vector<double> SchedulerGroups::lrs() const {
  std::vector<double> all;
  for (size_t g = 0; g < size(); ++g) all.push_back(lr(g));
  return all;
}

void SchedulerGroups::set_lr(size_t group, double rate) const {
  optimizer_.param_groups()[group].options().set_lr(rate);
}

double SchedulerGroups::initial_lr(size_t group) {
  return values(group).try_emplace("initial_lr", lr(group)).first->second;
}

SchedulerGroups::Values& SchedulerGroups::values(size_t group) {
  if (values_.size() <= group) values_.resize(group + 1);
  return values_[group];
}

double SchedulerGroups::value(size_t group, const std::string& name) {
  return values(group)[name];
}

void SchedulerGroups::require_momentum(const char* scheduler) const {
  const auto defaults = optimizer_.defaults().clone();
  if (change_momentum(*defaults, [](double&, bool) {})) return;
  throw std::invalid_argument(
      std::string(scheduler) +
      ": the optimizer has neither a momentum (SGD, RMSprop) nor betas (Adam, "
      "AdamW) to cycle; set cycle_momentum to false");
}

bool SchedulerGroups::has_beta1() const {
  bool is_beta1 = false;
  const auto defaults = optimizer_.defaults().clone();
  change_momentum(*defaults, [&](double&, bool beta1) { is_beta1 = beta1; });
  return is_beta1;
}

void SchedulerGroups::set_momentum(size_t group, double momentum) const {
  change_momentum(optimizer_.param_groups()[group].options(),
                  [&](double& place, bool) { place = momentum; });
}

StateTree SchedulerGroups::state() const {
  StateTree::List groups;
  for (size_t g = 0; g < size(); ++g) {
    StateTree::Dict dict;
    if (g < values_.size()) {
      for (const auto& [name, number] : values_[g]) dict.set(name, number);
    }
    groups.emplace_back(std::move(dict));
  }
  return groups;
}

std::function<void()> SchedulerGroups::prepare_load(const StateTree* state,
                                                    const char* scheduler) {
  if (!state) return [] {};
  std::vector<Values> read;
  for (const StateTree& item : list_in(*state, scheduler, "param_groups")) {
    Values& group = read.emplace_back();
    const auto* dict = item.as<StateTree::Dict>();
    if (!dict) refuse_state(scheduler, "param_groups is not a list of dicts");
    for (const auto& [name, number] : dict->items) {
      // A snapshot also has the optimizer's numbers in the same dict.
      if (is_scheduler_value(name)) {
        group[name] = number_in(number, scheduler, name);
      }
    }
  }
  if (read.size() > size()) {
    refuse_state(scheduler, "it has " + std::to_string(read.size()) +
                                " parameter groups, the optimizer has " +
                                std::to_string(size()));
  }
  return [this, read = std::move(read)] {
    for (size_t g = 0; g < read.size(); ++g) {
      for (const auto& [name, number] : read[g]) values(g)[name] = number;
    }
  };
}

}  // namespace lockstep::internal
