#include "lockstep/checkpoint/sharded/state_shards.h"

#include <ATen/Functions.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/sharded/shard_names.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {
namespace {

// Returns the value as a tensor; undefined for None.
at::Tensor tensor_of(const StateValue& value) {
  if (const auto* tensor = std::get_if<at::Tensor>(&value)) return *tensor;
  if (const auto* flag = std::get_if<bool>(&value)) {
    return at::scalar_tensor(*flag, at::kBool);
  }
  if (const auto* whole = std::get_if<int64_t>(&value)) {
    return at::scalar_tensor(*whole, at::kLong);
  }
  if (const auto* number = std::get_if<double>(&value)) {
    return at::scalar_tensor(*number, at::kDouble);
  }
  if (const auto* list = std::get_if<std::vector<double>>(&value)) {
    return at::tensor(*list, at::kDouble);
  }
  return {};
}

}  // namespace

OptimizerShards::State optimizer_state_of(torch::optim::Optimizer& optimizer) {
  if (auto* sharded = dynamic_cast<OptimizerShards*>(&optimizer)) {
    return sharded->shards();
  }
  OptimizerShards::State state;
  OptimizerState whole = state_dict(optimizer);
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : distinct(group.params())) {
      state.parts.push_back(
          {.parameter = static_cast<int64_t>(state.parameters.size()),
           .whole = true,
           .range = {0, parameter.numel()}});
      state.parameters.push_back(parameter);
    }
  }
  state.groups.param_groups = std::move(whole.param_groups);
  state.local.state = std::move(whole.state);
  return state;
}

void add_model(const torch::nn::Module& model,
               std::vector<TensorShard>& shards) {
  for (const auto& [name, tensor, is_parameter] : tensors_of(model)) {
    shards.push_back({kModelPrefix + name, whole_shape(tensor),
                      placement_of(tensor), tensor.detach(),
                      !is_parameter && layout_of(tensor) == nullptr});
  }
}

Sizes whole_shape(const at::Tensor& tensor) {
  const TensorLayout* layout = layout_of(tensor);
  return layout ? layout->shape : tensor.sizes().vec();
}

Placement placement_of(const at::Tensor& tensor) {
  return placement_of(
      {.parameter = 0, .whole = true, .range = {0, tensor.numel()}}, tensor);
}

Placement placement_of(const OptimizerShards::Part& part,
                       const at::Tensor& parameter) {
  const TensorLayout* layout = layout_of(parameter);
  if (!layout) {
    if (part.whole) return Replicate{};
    return FlatShard{part.range, memory_order(parameter)};
  }
  if (!layout->range) {
    if (part.whole) return Shard{layout->box};
    return FlatShard{part.range, memory_order(parameter), layout->box};
  }
  // The parameter has one dimension, so the part is a range of its range.
  Range range = *layout->range;
  if (!part.whole) {
    range = {range.begin + part.range.begin, range.begin + part.range.end};
  }
  Sizes order(layout->shape.size());
  std::iota(order.begin(), order.end(), 0);
  return FlatShard{range, order, layout->box};
}

void add_optimizer(const OptimizerShards::State& state,
                   const torch::nn::Module& model,
                   std::vector<TensorShard>& shards) {
  const std::vector<std::string> names = names_of(state, model);
  for (size_t i = 0; i < state.parts.size(); ++i) {
    const OptimizerShards::Part& part = state.parts[i];
    const auto number = static_cast<size_t>(part.parameter);
    const at::Tensor& parameter = state.parameters[number];
    const auto found = state.local.state.find(static_cast<int64_t>(i));
    if (found == state.local.state.end()) continue;
    for (const auto& [key, value] : found->second) {
      const at::Tensor tensor = tensor_of(value);
      if (!tensor.defined()) continue;
      const std::string name = kStatePrefix + names[number] + "." + key;
      if (tensor.dim() == 0) {
        shards.push_back({name, {}, Replicate{}, tensor});
      } else {
        shards.push_back({name, whole_shape(parameter),
                          placement_of(part, parameter), tensor.detach()});
      }
    }
  }
}

std::vector<std::string> names_of(const OptimizerShards::State& state,
                                  const torch::nn::Module& model) {
  const auto known = parameter_names(model);
  std::vector<std::string> names;
  for (const at::Tensor& parameter : state.parameters) {
    const auto found = known.find(parameter.unsafeGetTensorImpl());
    if (found == known.end()) {
      std::ostringstream text;
      text << "parameter " << names.size() << " of the optimizer, of shape "
           << parameter.sizes()
           << ", is not one of TrainingState.model, so it has no name in a "
              "folder of snapshots; let the model have all parameters of the "
              "optimizer, or name a file (\"snapshot.pt\")";
      throw std::invalid_argument(text.str());
    }
    names.push_back(found->second);
  }
  return names;
}

std::map<std::string, std::string> tied_names(const torch::nn::Module& model) {
  const auto first = parameter_names(model);
  std::map<std::string, std::string> tied;
  for (const ModuleTensor& tensor : tensors_of(model)) {
    if (!tensor.is_parameter) continue;
    const auto& name = first.at(tensor.tensor.unsafeGetTensorImpl());
    if (name != tensor.name) tied[tensor.name] = name;
  }
  return tied;
}

nlohmann::json stages_of(const torch::nn::Module& model) {
  nlohmann::json stages = nlohmann::json::object();
  bool any = false;
  for (const ModuleTensor& tensor : tensors_of(model)) {
    if (!tensor.is_parameter) continue;
    const TensorLayout* layout = layout_of(tensor.tensor);
    std::string of;
    if (layout != nullptr && layout->of_stage) {
      any = true;
      of = !layout->tied.empty()
               ? "the tied weight of " + layout->tied
               : "rank " + std::to_string(layout->groups.front()->rank()) +
                     " of its pipeline";
    }
    stages[tensor.name] = std::move(of);
  }
  return any ? stages : nlohmann::json::object();
}

void require_names_differ(const std::vector<nlohmann::json>& all) {
  std::map<std::string, std::pair<std::string, size_t>> known;  // and the rank
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& [name, stage] : all[rank].items()) {
      const auto of = stage.get<std::string>();
      const auto [first, is_new] = known.try_emplace(name, of, rank);
      const auto& [other, other_rank] = first->second;
      if (is_new || of == other) continue;
      const std::string pair = "\"" + name + "\" on rank " +
                               std::to_string(other_rank) + " and on rank " +
                               std::to_string(rank);
      if (of.empty() || other.empty()) {
        throw std::invalid_argument(
            "the parameter " + pair +
            " is one of a pipeline's stage only on rank " +
            std::to_string(of.empty() ? other_rank : rank) +
            ", so its values differ; save and load on each rank a module that "
            "has the parameters of the rank's own stages only");
      }
      throw std::invalid_argument(
          "stages of a pipeline have different parameters of one name: " +
          pair +
          "; a snapshot has one parameter of a name, so give the modules of "
          "the stages names that differ, for example those that they have in "
          "the whole model, as stage_of() does, or name a weight that they "
          "share in PipelineOptions::tied_weights");
    }
  }
}

std::vector<NamedGroup> named_groups(const OptimizerShards::State& state,
                                     const torch::nn::Module& model) {
  const std::vector<std::string> names = names_of(state, model);
  std::vector<NamedGroup> groups;
  for (const auto& group : state.groups.param_groups) {
    NamedGroup& named = groups.emplace_back();
    named.options = group.options;
    for (const int64_t number : group.params) {
      named.params.push_back(names[static_cast<size_t>(number)]);
    }
  }
  return groups;
}

}  // namespace lockstep::internal
