#include "lockstep/parallel/join/joined_optimizer.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/optimizer_fields.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/gradient_shards.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep {
namespace {

using internal::kStepName;
using NamedValues = std::map<std::string, StateValue>;

// Stands for a tensor of its parameter's shape, which is sent separately.
constexpr const char* kTensorWord = "tensor";

Object words_of(const NamedValues& values) {
  Object words = Object::object();
  for (const auto& [name, value] : values) {
    words[name] = std::visit(
        [&name = name](const auto& held) -> Object {
          using Held = std::decay_t<decltype(held)>;
          if constexpr (std::is_same_v<Held, std::monostate>) {
            return nullptr;
          } else if constexpr (std::is_same_v<Held, at::Tensor>) {
            if (name == kStepName) return held.template item<double>();
            return kTensorWord;
          } else {
            return held;
          }
        },
        value);
  }
  return words;
}

// Reverses words_of(); `receive` makes the tensors.
NamedValues values_of(const Object& words,
                      const std::function<at::Tensor()>& receive) {
  NamedValues values;
  for (const auto& [name, word] : words.items()) {
    StateValue& value = values[name];
    if (word.is_string()) {
      value = receive();
    } else if (word.is_boolean()) {
      value = word.get<bool>();
    } else if (word.is_number_integer()) {
      value = word.get<int64_t>();
    } else if (word.is_number()) {
      value = word.get<double>();
    } else if (word.is_array()) {
      value = word.get<std::vector<double>>();
    }
  }
  return values;
}

}  // namespace

JoinedOptimizer::JoinedOptimizer(torch::optim::Optimizer& optimizer,
                                 ProcessGroupPtr process_group)
    : optimizer_(optimizer),
      group_(internal::group_or_default(std::move(process_group))) {
  if (dynamic_cast<GradientShards*>(&optimizer)) {
    throw std::invalid_argument(
        "JoinedOptimizer: the optimizer is sharded; it takes part in join() "
        "itself, so give it to join() instead");
  }
  internal::require_state_dict(optimizer);
  internal::Agreement agreement(group_);
  const auto& groups = optimizer.param_groups();
  agreement.hold("the number of parameter groups",
                 std::to_string(groups.size()));
  for (size_t g = 0; g < groups.size(); ++g) {
    size_t number = 0;
    for (const at::Tensor& parameter : distinct(groups[g].params())) {
      agreement.hold(c10::str("parameter ", number++, " of group ", g),
                     c10::str(parameter.scalar_type(), parameter.sizes()));
    }
  }
  if (const auto difference = agreement.compare()) {
    throw std::invalid_argument(
        "JoinedOptimizer: " + difference->words() +
        "; groups, shapes and dtypes must be the same on all ranks");
  }
  // Later, so that no rank waits for one that throws.
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      internal::require_replica(
          parameter, *group_, "JoinedOptimizer",
          "give process_group the ranks that have the same part");
    }
  }
}

void JoinedOptimizer::after_join(int last_joiner) {
  if (group_->size() == 1) return;
  const at::NoGradGuard no_grad;
  const int source = group_->global_rank(last_joiner);
  const bool gives = group_->rank() == last_joiner;
  OptimizerState state = state_dict(optimizer_);
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer_.param_groups()) {
    for (auto& each : distinct(group.params())) parameters.push_back(each);
  }

  Object words{{"groups", Object::array()}, {"state", Object::array()}};
  for (const auto& group : state.param_groups) {
    words["groups"].push_back(words_of(group.options));
  }
  for (const auto& [number, values] : state.state) {
    words["state"].push_back({number, words_of(values)});
  }
  words = broadcast_object(words, source, {.group = group_});

  if (gives) {
    for (const auto& [number, values] : state.state) {
      for (const auto& [name, value] : values) {
        const auto* tensor = std::get_if<at::Tensor>(&value);
        if (!tensor || name == kStepName) continue;
        const auto& parameter = parameters[static_cast<size_t>(number)];
        broadcast(tensor->to(parameter.options()), source, {.group = group_});
      }
    }
    return;
  }
  for (size_t g = 0; g < state.param_groups.size(); ++g) {
    state.param_groups[g].options = values_of(words["groups"].at(g), nullptr);
  }
  state.state.clear();
  for (const Object& entry : words["state"]) {
    const auto number = entry.at(0).get<int64_t>();
    state.state[number] = values_of(entry.at(1), [&] {
      const auto& parameter = parameters[static_cast<size_t>(number)];
      at::Tensor tensor = at::empty(parameter.sizes(), parameter.options());
      broadcast(tensor, source, {.group = group_});
      return tensor;
    });
  }
  load_state_dict(optimizer_, state);
}

}  // namespace lockstep
