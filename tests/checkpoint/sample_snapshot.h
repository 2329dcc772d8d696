#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <sstream>
#include <string>

#include "lockstep/checkpoint/snapshot.h"

// Shared by the tests of this folder: a snapshot with something in every
// member, and its comparison.
namespace lockstep::internal::testing {

// Returns a snapshot so small that a test can try every byte of its file.
inline Snapshot sample_snapshot() {
  Snapshot s;
  s.model_state = {{"0.weight", torch::arange(6, torch::kFloat).view({2, 3})},
                   {"0.bias", torch::ones(2)},
                   {"1.num_batches_tracked", torch::tensor(int64_t{7})}};
  OptimizerState optimizer;
  optimizer.param_groups.push_back({{{"lr", 0.1},
                                     {"betas", std::vector<double>{0.9, 0.999}},
                                     {"amsgrad", false},
                                     {"foreach", std::monostate()},
                                     {"whole", int64_t{3}}},
                                    {0, 1}});
  optimizer.state[0] = {{"step", torch::tensor(5.0f)},
                        {"exp_avg", torch::full({2, 3}, 0.25)}};
  optimizer.state[1] = {{"step", int64_t{5}}};
  optimizer.averager_step = 8;
  s.optimizer_state = optimizer;
  StateTree::Dict part, scheduler;
  part.set("gamma", 0.5);
  scheduler.set("T_max", 10);
  scheduler.set("eta_min", 1.0);
  scheduler.set("best", std::numeric_limits<double>::infinity());
  scheduler.set("flag", true);
  scheduler.set("mode", "min");
  scheduler.set("none", StateTree());
  scheduler.set("base_lrs", StateTree::List{0.1, 0.2});
  scheduler.set("milestones", StateTree::Counter{{-5, 1}, {30, 2}});
  scheduler.set("_schedulers", StateTree::List{part, part});
  s.scheduler_state = scheduler;
  s.epochs_run = 10;
  s.step = 1234567890123;
  s.sampler_state = {{"epoch", 11}, {"consumed", 96}, {"seed", -1}};
  s.generator_states = {torch::arange(16, torch::kByte),
                        torch::arange(16, 32, torch::kByte)};
  s.metadata = {{"note", "from \"here\", ü"}, {"empty", ""}};
  return s;
}

inline bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         torch::equal(a, b);
}

inline bool same_value(const StateValue& a, const StateValue& b) {
  const auto* x = std::get_if<at::Tensor>(&a);
  const auto* y = std::get_if<at::Tensor>(&b);
  if (x && y) return same_tensor(*x, *y);
  if (x || y || a.index() != b.index()) return false;
  if (const auto* v = std::get_if<bool>(&a)) return *v == std::get<bool>(b);
  if (const auto* v = std::get_if<int64_t>(&a)) {
    return *v == std::get<int64_t>(b);
  }
  if (const auto* v = std::get_if<double>(&a)) return *v == std::get<double>(b);
  if (const auto* v = std::get_if<std::vector<double>>(&a)) {
    return *v == std::get<std::vector<double>>(b);
  }
  return true;
}

inline bool same_values(const std::map<std::string, StateValue>& a,
                        const std::map<std::string, StateValue>& b) {
  return a.size() == b.size() &&
         std::all_of(a.begin(), a.end(), [&](const auto& item) {
           const auto found = b.find(item.first);
           return found != b.end() && same_value(item.second, found->second);
         });
}

inline bool same_optimizer(const OptimizerState& a, const OptimizerState& b) {
  if (a.state.size() != b.state.size() || a.averager_step != b.averager_step ||
      a.param_groups.size() != b.param_groups.size()) {
    return false;
  }
  for (const auto& [index, values] : a.state) {
    if (!b.state.contains(index) || !same_values(values, b.state.at(index))) {
      return false;
    }
  }
  for (size_t i = 0; i < a.param_groups.size(); ++i) {
    if (a.param_groups[i].params != b.param_groups[i].params ||
        !same_values(a.param_groups[i].options, b.param_groups[i].options)) {
      return false;
    }
  }
  return true;
}

// Ignores the order of the tensors: safetensors sorts them by width.
inline bool same_snapshot(const Snapshot& a, const Snapshot& b) {
  const std::map<std::string, at::Tensor> x(a.model_state.begin(),
                                            a.model_state.end());
  const std::map<std::string, at::Tensor> y(b.model_state.begin(),
                                            b.model_state.end());
  bool same =
      a.model_state.size() == b.model_state.size() && x.size() == y.size() &&
      std::all_of(x.begin(), x.end(), [&](const auto& item) {
        const auto found = y.find(item.first);
        return found != y.end() && same_tensor(item.second, found->second);
      });
  same = same && a.generator_states.size() == b.generator_states.size();
  for (size_t i = 0; same && i < a.generator_states.size(); ++i) {
    same = same_tensor(a.generator_states[i], b.generator_states[i]);
  }
  same = same && a.optimizer_state.has_value() == b.optimizer_state.has_value();
  if (same && a.optimizer_state) {
    same = same_optimizer(*a.optimizer_state, *b.optimizer_state);
  }
  same = same && a.scheduler_state == b.scheduler_state;
  return same && a.epochs_run == b.epochs_run && a.step == b.step &&
         a.sampler_state == b.sampler_state && a.metadata == b.metadata;
}

}  // namespace lockstep::internal::testing
