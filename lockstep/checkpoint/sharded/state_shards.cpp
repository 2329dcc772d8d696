#include "lockstep/checkpoint/sharded/state_shards.h"

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/checkpoint/tensor_bytes.h"
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

// The result also stands for dtype and shape.
std::string checksum_of_values(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return "not dense";  // is refused later
  const at::Tensor values = file_form(tensor);
  Xxh3 checksum;
  checksum.add(values.const_data_ptr(), values.nbytes());
  return c10::str(values.scalar_type(), values.sizes(), " ",
                  hex_of(checksum.value()));
}

// The tensors of a rank under one name: an entry of its stages_of().
struct NamedOnRank {
  NamedOnRank(const nlohmann::json& entry, size_t on_rank) : rank(on_rank) {
    const bool is_buffer = entry.is_array();
    of = (is_buffer ? entry.at(0) : entry).get<std::string>();
    if (is_buffer) values = entry.at(1).get<std::string>();
  }
  bool has_values_of(const NamedOnRank& other) const {
    return of == other.of || (!values.empty() && values == other.values);
  }
  std::string of;
  std::string values;  // of a buffer; "" for a parameter
  size_t rank;
};

// Says which rank has this tensor, if ranks have different ones of its name,
// and is equal on all ranks that have the same one; "" if all ranks have it.
std::string owner_of(const at::Tensor& tensor) {
  const TensorLayout* layout = layout_of(tensor);
  if (layout == nullptr) return "";
  std::string owner;
  if (!layout->tied.empty()) {
    owner = "the tied weight of " + layout->tied;
  } else if (layout->of_stage) {
    owner = "rank " + std::to_string(layout->groups.front()->rank()) +
            " of its pipeline";
  }
  if (layout->own_in) {
    owner += (owner.empty() ? "" : ", ") + std::string("rank ") +
             std::to_string(layout->own_in->rank()) + " of its owners";
  }
  return owner;
}

bool is_duplicate(const at::Tensor& tensor) {
  const TensorLayout* layout = layout_of(tensor);
  return layout != nullptr && layout->duplicate;
}

}  // namespace

OptimizerShards::State optimizer_state_of(torch::optim::Optimizer& optimizer) {
  if (auto* sharded = dynamic_cast<OptimizerShards*>(&optimizer)) {
    return sharded->shards();
  }
  OptimizerShards::State state;
  state.of_first_rank = has_state_of_each_rank(optimizer);
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
  state.groups.averager_step = whole.averager_step;
  state.local.state = std::move(whole.state);
  return state;
}

OptimizerShards::State known_state_of(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<OptimizerShards*>(&optimizer) == nullptr) {
    return optimizer_state_of(optimizer);
  }
  OptimizerShards::State state;
  for (const auto& group : optimizer.param_groups()) {
    auto& numbers = state.groups.param_groups.emplace_back().params;
    for (const at::Tensor& parameter : distinct(group.params())) {
      numbers.push_back(static_cast<int64_t>(state.parameters.size()));
      state.parameters.push_back(parameter);
    }
  }
  return state;
}

void add_model(const torch::nn::Module& model, const std::string& prefix,
               std::vector<TensorShard>& shards) {
  for (const auto& [name, tensor, is_parameter] : tensors_of(model)) {
    const TensorLayout* layout = layout_of(tensor);
    const bool whole = layout == nullptr ||
                       (!layout->range && layout->box.sizes == layout->shape);
    const bool of_first_rank = !is_parameter && whole;
    shards.push_back(
        {.name = prefix + name,
         .shape = whole_shape(tensor),
         .placement = of_first_rank ? Replicate{} : placement_of(tensor),
         .tensor = tensor.detach(),
         .of_first_rank = of_first_rank,
         .duplicate = is_duplicate(tensor)});
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
  // The parameter is contiguous, so the part is a range of its range.
  Range range = *layout->range;
  if (!part.whole) {
    range = {range.begin + part.range.begin, range.begin + part.range.end};
  }
  Sizes order(layout->shape.size());
  std::iota(order.begin(), order.end(), 0);
  return FlatShard{range, order, layout->box};
}

void add_optimizer(const OptimizerShards::State& state,
                   const torch::nn::Module& model, const std::string& prefix,
                   std::vector<TensorShard>& shards) {
  const std::vector<std::string> names = names_of(state, model);
  for (size_t i = 0; i < state.parts.size(); ++i) {
    const OptimizerShards::Part& part = state.parts[i];
    const auto number = static_cast<size_t>(part.parameter);
    const at::Tensor& parameter = state.parameters[number];
    const auto found = state.local.state.find(static_cast<int64_t>(i));
    if (found == state.local.state.end()) continue;
    // An optimizer may leave such a part out of its steps. The ranks that have
    // elements know the count.
    const bool is_empty_part =
        part.range.size() == 0 && numel_of(whole_shape(parameter)) > 0;
    for (const auto& [key, value] : found->second) {
      const at::Tensor tensor = tensor_of(value);
      if (!tensor.defined()) continue;
      const std::string name = prefix + names[number] + "." + key;
      if (tensor.dim() == 0) {
        if (is_empty_part) continue;
        shards.push_back({name, {}, Replicate{}, tensor});
      } else {
        shards.push_back({.name = name,
                          .shape = whole_shape(parameter),
                          .placement = placement_of(part, parameter),
                          .tensor = tensor.detach(),
                          .duplicate = is_duplicate(parameter)});
      }
      shards.back().of_first_rank = state.of_first_rank;
    }
  }
}

bool has_all_parameters(const OptimizerShards::State& state,
                        const torch::nn::Module& model) {
  const auto known = parameter_names(model);
  return std::ranges::all_of(state.parameters, [&](const at::Tensor& one) {
    return known.contains(one.unsafeGetTensorImpl()) ||
           whole_shape(one) == Sizes{0};
  });
}

std::vector<std::string> names_of(const OptimizerShards::State& state,
                                  const torch::nn::Module& model) {
  const auto known = parameter_names(model);
  std::vector<std::string> names;
  for (const at::Tensor& parameter : state.parameters) {
    const auto found = known.find(parameter.unsafeGetTensorImpl());
    if (found == known.end() && whole_shape(parameter) == Sizes{0}) {
      names.emplace_back();
      continue;
    }
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

nlohmann::json stages_of(const torch::nn::Module& model, bool buffers) {
  nlohmann::json stages = nlohmann::json::object();
  bool any = false;
  for (const auto& [name, tensor, is_parameter] : tensors_of(model)) {
    std::string of = owner_of(tensor);
    if (!is_parameter && !(buffers && !of.empty())) continue;
    any = any || !of.empty();
    if (is_parameter) {
      stages[name] = std::move(of);
    } else {
      stages[name] = {std::move(of), checksum_of_values(tensor)};
    }
  }
  return any ? stages : nlohmann::json::object();
}

void require_names_differ(const std::vector<nlohmann::json>& all) {
  std::map<std::string, std::vector<NamedOnRank>> known;  // each stage once
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& [name, stage] : all[rank].items()) {
      const NamedOnRank mine(stage, rank);
      std::vector<NamedOnRank>& others = known[name];
      const bool is_known = std::ranges::any_of(
          others,
          [&](const NamedOnRank& other) { return mine.of == other.of; });
      if (!is_known) others.push_back(mine);
      const NamedOnRank& other = others.front();
      if (is_known || mine.has_values_of(other)) continue;
      const std::string pair = "\"" + name + "\" on rank " +
                               std::to_string(other.rank) + " and on rank " +
                               std::to_string(rank);
      if (mine.of.empty() || other.of.empty()) {
        throw std::invalid_argument(
            "the parameter " + pair +
            " is one of a pipeline's stage, or a rank's own, only on rank " +
            std::to_string(mine.of.empty() ? other.rank : rank) +
            ", so its values differ; save and load on each rank a module that "
            "has the parameters of the rank's own stages, and its own, only");
      }
      const std::string what = mine.values.empty() ? "parameter" : "buffer";
      throw std::invalid_argument(
          "ranks have different " + what +
          "s of one name, as stages of a "
          "pipeline or by set_placement(Own): " +
          pair + "; a snapshot has one " + what +
          " of a name, so give the modules names that differ, for example "
          "those that they have in the whole model, as stage_of() does" +
          (mine.values.empty() ? ", or name a weight that they share in "
                                 "PipelineOptions::tied_weights"
                               : ""));
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
      const std::string& name = names[static_cast<size_t>(number)];
      if (!name.empty()) named.params.push_back(name);
    }
  }
  return groups;
}

}  // namespace lockstep::internal
