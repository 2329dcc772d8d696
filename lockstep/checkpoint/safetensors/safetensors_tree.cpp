#include "lockstep/checkpoint/safetensors/safetensors_tree.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>

#include "lockstep/checkpoint/safetensors/strict_json.h"
#include "lockstep/checkpoint/tensor_bytes.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

constexpr int kFormat = 1;
constexpr const char* kReserved = "lockstep.";
constexpr const char* kState = "lockstep.state.";  // + index + "." + name
constexpr const char* kGroup = "lockstep.param_groups.";   // likewise
constexpr const char* kGenerator = "lockstep.generator.";  // + rank
// A scheduler in a scheduler in a scheduler needs ten.
constexpr int kTreeDepth = 32;

// JSON has no infinity and no NaN, so these three are strings.
Json json_of(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

double double_of(const Json& json) {
  if (!json.is_string()) return json.get<double>();
  const auto text = json.get<std::string>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (text == "inf") return kInfinity;
  if (text == "-inf") return -kInfinity;
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  throw std::runtime_error("\"" + text + "\" is not a number");
}

// Moves tensors into `tensors`, under `prefix`, and returns the rest as JSON.
Json split(const std::map<std::string, StateValue>& values,
           const std::string& prefix, NamedTensors& tensors) {
  Json json = Json::object();
  for (const auto& [name, value] : values) {
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      tensors.emplace_back(prefix + name, file_form(*tensor));
    } else if (const auto* flag = std::get_if<bool>(&value)) {
      json[name] = *flag;
    } else if (const auto* integer = std::get_if<int64_t>(&value)) {
      json[name] = *integer;
    } else if (const auto* number = std::get_if<double>(&value)) {
      json[name] = json_of(*number);
    } else if (const auto* list = std::get_if<std::vector<double>>(&value)) {
      json[name] = Json::array();
      for (const double item : *list) json[name].push_back(json_of(item));
    } else {
      json[name] = nullptr;
    }
  }
  return json;
}

Json json_of(const StateTree& tree) {
  if (const auto* flag = tree.as<bool>()) return *flag;
  if (const auto* integer = tree.as<int64_t>()) return *integer;
  if (const auto* number = tree.as<double>()) return json_of(*number);
  if (const auto* text = tree.as<std::string>()) return *text;
  if (const auto* list = tree.as<StateTree::List>()) {
    Json json = Json::array();
    for (const StateTree& item : *list) json.push_back(json_of(item));
    return json;
  }
  if (const auto* dict = tree.as<StateTree::Dict>()) {
    Json json = Json::object();
    for (const auto& [name, item] : dict->items) json[name] = json_of(item);
    return json;
  }
  if (const auto* counter = tree.as<StateTree::Counter>()) {
    Json json = Json::object();
    for (const auto& [key, count] : *counter) {
      json[std::to_string(key)] = count;
    }
    return json;
  }
  return nullptr;
}

// Returns the integer that `text` writes; none if it writes none.
std::optional<int64_t> integer_of(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

// An object whose first key is an integer is a Counter.
StateTree tree_of(const Json& json) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) {
    const auto text = json.get<std::string>();
    if (text == "inf" || text == "-inf" || text == "nan") {
      return double_of(json);
    }
    return text;
  }
  if (json.is_array()) {
    StateTree::List list;
    for (const Json& item : json) list.push_back(tree_of(item));
    return list;
  }
  if (!json.is_object()) return {};
  if (!json.empty() && integer_of(json.begin().key())) {
    StateTree::Counter counter;
    for (const auto& [key, count] : json.items()) {
      const auto number = integer_of(key);
      if (!number) throw std::runtime_error("a Counter has the key " + key);
      counter[*number] = count.get<int64_t>();
    }
    return counter;
  }
  StateTree::Dict dict;
  for (const auto& [name, item] : json.items()) {
    dict.items.emplace_back(name, tree_of(item));
  }
  return dict;
}

std::map<std::string, StateValue> values_of(const Json& json) {
  std::map<std::string, StateValue> values;
  for (const auto& [name, item] : json.items()) {
    if (item.is_null()) {
      values[name] = std::monostate();
    } else if (item.is_boolean()) {
      values[name] = item.get<bool>();
    } else if (item.is_number_integer()) {
      values[name] = item.get<int64_t>();
    } else if (item.is_array()) {
      std::vector<double> list;
      for (const Json& number : item) list.push_back(double_of(number));
      values[name] = std::move(list);
    } else {
      values[name] = double_of(item);
    }
  }
  return values;
}

// Splits "12.exp_avg" into parameter 12 and its "exp_avg".
std::pair<int64_t, std::string> split_index(const std::string& text) {
  int64_t index = -1;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, index);
  if (error != std::errc() || index < 0 || (rest != end && *rest != '.')) {
    throw std::runtime_error("a tensor under \"lockstep.\" has no index");
  }
  return {index, rest == end ? "" : std::string(rest + 1, end)};
}

// The same for what follows `prefix` in `name`; nothing if that begins
// otherwise.
std::optional<std::pair<int64_t, std::string>> index_after(
    std::string_view prefix, const std::string& name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  return split_index(name.substr(prefix.size()));
}

// Returns where the optimizer's value with this name belongs, or nullptr if the
// snapshot has no such parameter or group.
StateValue* optimizer_value(Snapshot& snapshot, const std::string& name) {
  if (!snapshot.optimizer_state) return nullptr;
  auto& [state, groups] = *snapshot.optimizer_state;
  if (const auto place = index_after(kState, name)) {
    const auto found = state.find(place->first);
    return found == state.end() ? nullptr : &found->second[place->second];
  }
  if (const auto place = index_after(kGroup, name)) {
    const auto at = static_cast<size_t>(place->first);
    return at < groups.size() ? &groups[at].options[place->second] : nullptr;
  }
  return nullptr;
}

}  // namespace

SafetensorsTree safetensors_tree_of(const Snapshot& snapshot) {
  SafetensorsTree tree;
  std::set<std::string> names;
  for (const auto& [name, tensor] : snapshot.model_state) {
    if (name.starts_with(kReserved) || name == "__metadata__") {
      throw std::invalid_argument("the model has a tensor named \"" + name +
                                  "\", which is reserved in safetensors; "
                                  "rename it, or name the snapshot .pt");
    }
    if (!names.insert(name).second) {
      throw std::invalid_argument("the model has two tensors named \"" + name +
                                  "\"; a snapshot needs one name for each");
    }
    tree.tensors.emplace_back(name, file_form(tensor));
  }
  Json json = {{"format", kFormat},
               {"epochs_run", snapshot.epochs_run},
               {"step", snapshot.step},
               {"sampler_state", snapshot.sampler_state},
               {"generator_states", snapshot.generator_states.size()},
               {"metadata", snapshot.metadata}};
  if (snapshot.optimizer_state) {
    Json state = Json::object();
    for (const auto& [index, values] : snapshot.optimizer_state->state) {
      const std::string key = std::to_string(index);
      state[key] = split(values, kState + key + ".", tree.tensors);
    }
    Json groups = Json::array();
    for (const auto& group : snapshot.optimizer_state->param_groups) {
      const std::string key = std::to_string(groups.size());
      Json options = split(group.options, kGroup + key + ".", tree.tensors);
      groups.push_back({{"options", options}, {"params", group.params}});
    }
    json["optimizer_state"] = {{"state", state}, {"param_groups", groups}};
  }
  if (snapshot.scheduler_state) {
    json["scheduler_state"] = json_of(*snapshot.scheduler_state);
  }
  for (size_t rank = 0; rank < snapshot.generator_states.size(); ++rank) {
    tree.tensors.emplace_back(kGenerator + std::to_string(rank),
                              file_form(snapshot.generator_states[rank]));
  }
  tree.description = json.dump();
  return tree;
}

Snapshot snapshot_of(const SafetensorsTree& tree) {
  Snapshot snapshot;
  if (tree.description.empty()) {
    snapshot.model_state = tree.tensors;
    return snapshot;
  }
  const Json json = parse_strict_json(tree.description, kTreeDepth);
  if (json.at("format").get<int>() != kFormat) {
    throw std::runtime_error("its format is " + json.at("format").dump() +
                             ", but this version of Lockstep reads only 1");
  }
  snapshot.epochs_run = json.at("epochs_run").get<int64_t>();
  snapshot.step = json.at("step").get<int64_t>();
  snapshot.sampler_state = json.at("sampler_state").get<SamplerState>();
  snapshot.metadata =
      json.at("metadata").get<std::map<std::string, std::string>>();
  if (json.contains("optimizer_state")) {
    OptimizerState& optimizer = snapshot.optimizer_state.emplace();
    const Json& stored = json.at("optimizer_state");
    for (const auto& [index, values] : stored.at("state").items()) {
      const auto [parameter, key] = split_index(index);
      if (!key.empty()) {
        throw std::runtime_error("the optimizer's state is of \"" + index +
                                 "\", which is not a parameter's number");
      }
      optimizer.state[parameter] = values_of(values);
    }
    for (const Json& group : stored.at("param_groups")) {
      optimizer.param_groups.push_back(
          {values_of(group.at("options")),
           group.at("params").get<std::vector<int64_t>>()});
    }
  }
  if (json.contains("scheduler_state")) {
    const Json& stored = json.at("scheduler_state");
    if (!stored.is_object()) {
      throw std::runtime_error("the scheduler's state is not an object");
    }
    StateTree tree_read = tree_of(stored);
    if (!tree_read.as<StateTree::Dict>()) {
      throw std::runtime_error(
          "the scheduler's state is not an object by names");
    }
    snapshot.scheduler_state = std::move(tree_read);
  }
  std::map<int64_t, at::Tensor> generators;
  for (const auto& [name, tensor] : tree.tensors) {
    if (!name.starts_with(kReserved)) {
      snapshot.model_state.emplace_back(name, tensor);
    } else if (const auto rank = index_after(kGenerator, name)) {
      generators[rank->first] = tensor;
    } else if (auto* place = optimizer_value(snapshot, name)) {
      *place = tensor;
    } else {
      throw std::runtime_error("the description says nothing of the tensor \"" +
                               name + "\"");
    }
  }
  if (json.at("generator_states").get<size_t>() != generators.size()) {
    throw std::runtime_error("a generator's state is missing");
  }
  for (auto& [rank, tensor] : generators) {
    snapshot.generator_states.push_back(tensor);
  }
  return snapshot;
}

}  // namespace lockstep::internal
