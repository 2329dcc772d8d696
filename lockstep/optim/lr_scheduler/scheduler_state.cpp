#include "lockstep/optim/lr_scheduler/scheduler_state.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <utility>

#include "lockstep/state/optimizer_group.h"

namespace lockstep::internal {
namespace {

// Names that tell the kinds of schedulers apart: each is a hyperparameter of
// one kind or of some kinds.
constexpr std::array<std::string_view, 22> kHyperparameters{
    "T_0",         "T_max",           "T_mult",     "_milestones",
    "_schedulers", "anneal_epochs",   "end_factor", "eta_min",
    "factor",      "gamma",           "lr_lambdas", "max_lrs",
    "milestones",  "patience",        "power",      "start_factor",
    "step_ratio",  "step_size",       "threshold",  "total_iters",
    "total_steps", "_schedule_phases"};

int64_t integer_in(const StateTree& value, const char* scheduler,
                   const std::string& name, int64_t least) {
  // Python has a float where a float was given (T_cur, after a step to an
  // epoch that is not an integer).
  const double number = number_in(value, scheduler, name);
  if (number != std::floor(number) || std::abs(number) > StateFields::kMost) {
    refuse_state(scheduler, name + " is not an integer");
  }
  const auto integer = static_cast<int64_t>(number);
  if (integer < least) {
    refuse_state(scheduler, name + " is " + std::to_string(integer) +
                                ", at least " + std::to_string(least) +
                                " is allowed");
  }
  return integer;
}

template <class T>
std::function<void()> store(T& place, T value) {
  // Moving into the place does not throw.
  return [&place, value = std::move(value)]() mutable {
    place = std::move(value);
  };
}

}  // namespace

void refuse_state(const char* scheduler, const std::string& why) {
  throw std::invalid_argument(
      "the scheduler's state does not fit this " + std::string(scheduler) +
      ": " + why +
      "; construct the scheduler that was saved, or start without its state");
}

double number_in(const StateTree& value, const char* scheduler,
                 const std::string& name) {
  if (const auto* number = value.as<double>()) return *number;
  if (const auto* integer = value.as<int64_t>()) {
    return static_cast<double>(*integer);
  }
  refuse_state(scheduler, name + " is not a number");
}

const StateTree::List& list_in(const StateTree& value, const char* scheduler,
                               const std::string& name) {
  if (const auto* list = value.as<StateTree::List>()) return *list;
  refuse_state(scheduler, name + " is not a list");
}

void StateFields::add(const char* name, double& place) {
  add(
      name, [&place] { return StateTree(place); },
      [scheduler = scheduler_, name, &place](const StateTree& value) {
        return store(place, number_in(value, scheduler, name));
      });
}

void StateFields::add(const char* name, std::optional<double>& place) {
  add(
      name, [&place] { return place ? StateTree(*place) : StateTree(); },
      [scheduler = scheduler_, name, &place](const StateTree& value) {
        return store(place, value.as<std::monostate>()
                                ? std::optional<double>()
                                : number_in(value, scheduler, name));
      });
}

void StateFields::add(const char* name, int64_t& place, int64_t least) {
  add(
      name, [&place] { return StateTree(place); },
      [scheduler = scheduler_, name, least, &place](const StateTree& value) {
        return store(place, integer_in(value, scheduler, name, least));
      });
}

void StateFields::add(const char* name, std::vector<double>& place,
                      size_t most) {
  add(
      name,
      [&place] {
        return StateTree(StateTree::List(place.begin(), place.end()));
      },
      [scheduler = scheduler_, name, most, &place](const StateTree& value) {
        std::vector<double> numbers;
        for (const StateTree& item : list_in(value, scheduler, name)) {
          numbers.push_back(number_in(item, scheduler, name));
        }
        if (numbers.size() > most) {
          refuse_state(scheduler, std::string(name) + " has " +
                                      std::to_string(numbers.size()) +
                                      " values, the optimizer has " +
                                      std::to_string(most) +
                                      " parameter groups");
        }
        return store(place, std::move(numbers));
      });
}

void StateFields::add(const char* name, std::vector<int64_t>& place,
                      size_t size) {
  add(
      name,
      [&place] {
        return StateTree(StateTree::List(place.begin(), place.end()));
      },
      [scheduler = scheduler_, name, size, &place](const StateTree& value) {
        std::vector<int64_t> integers;
        for (const StateTree& item : list_in(value, scheduler, name)) {
          integers.push_back(integer_in(item, scheduler, name, -kMost));
        }
        if (integers.size() != size) {
          refuse_state(scheduler, std::string(name) + " has " +
                                      std::to_string(integers.size()) +
                                      " values, there are " +
                                      std::to_string(size));
        }
        return store(place, std::move(integers));
      });
}

void StateFields::add(const char* name, StateTree::Counter& place) {
  add(
      name, [&place] { return StateTree(place); },
      [scheduler = scheduler_, name, &place](const StateTree& value) {
        const auto* counter = value.as<StateTree::Counter>();
        const auto* dict = value.as<StateTree::Dict>();
        // JSON cannot tell an empty counter from an empty dict.
        const bool empty = dict && dict->items.empty();
        if (!counter && !empty) {
          refuse_state(scheduler, std::string(name) + " is not a Counter");
        }
        return store(place, counter ? *counter : StateTree::Counter());
      });
}

void StateFields::add_text(const char* name, std::vector<std::string> texts,
                           std::function<size_t()> get,
                           std::function<void(size_t)> set) {
  add(
      name, [texts, get = std::move(get)] { return StateTree(texts[get()]); },
      [scheduler = scheduler_, name, texts,
       set = std::move(set)](const StateTree& value) -> std::function<void()> {
        const auto* text = value.as<std::string>();
        const auto found =
            text ? std::find(texts.begin(), texts.end(), *text) : texts.end();
        if (found == texts.end()) {
          std::string allowed;
          for (const std::string& one : texts) {
            allowed += (allowed.empty() ? "" : ", ") + one;
          }
          refuse_state(scheduler,
                       std::string(name) + " is not one of " + allowed);
        }
        const auto index = static_cast<size_t>(found - texts.begin());
        return [set, index] { set(index); };
      });
}

void StateFields::add_constant(const char* name, StateTree value) {
  add(name, [value = std::move(value)] { return value; }, nullptr);
}

void StateFields::add_fixed(const char* name, StateTree value) {
  add(
      name, [value] { return value; },
      [scheduler = scheduler_, name,
       value](const StateTree& saved) -> std::function<void()> {
        if (!(saved == value)) {
          refuse_state(scheduler,
                       std::string("it was saved with another ") + name);
        }
        return [] {};
      });
}

void StateFields::add(const char* name, Capture capture, Restore restore) {
  fields_.push_back({name, std::move(capture), std::move(restore)});
}

StateTree::Dict StateFields::capture() const {
  StateTree::Dict dict;
  for (const Field& field : fields_) dict.set(field.name, field.capture());
  return dict;
}

std::function<void()> StateFields::restore(const StateTree& state) const {
  const auto* dict = state.as<StateTree::Dict>();
  if (!dict) refuse_state(scheduler_, "it is not a dict");
  for (const std::string_view foreign : kHyperparameters) {
    const bool own =
        std::any_of(fields_.begin(), fields_.end(),
                    [&](const Field& field) { return field.name == foreign; });
    if (!own && dict->find(std::string(foreign))) {
      refuse_state(scheduler_, "it has " + std::string(foreign) +
                                   ", which this kind of scheduler does not "
                                   "have");
    }
  }
  std::vector<std::function<void()>> stores;
  for (const Field& field : fields_) {
    if (!field.restore) continue;
    const StateTree* value = dict->find(field.name);
    if (!value) {
      refuse_state(scheduler_, std::string(field.name) + " is missing");
    }
    stores.push_back(field.restore(*value));
  }
  return [stores = std::move(stores)] {
    for (const auto& one : stores) one();
  };
}

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
