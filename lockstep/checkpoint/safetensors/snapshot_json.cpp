#include "lockstep/checkpoint/safetensors/snapshot_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "lockstep/checkpoint/tensor_bytes.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

// JSON has no infinity and no NaN, so these three are strings.
Json json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

bool is_text_of_number(const std::string& text) {
  return text == "inf" || text == "-inf" || text == "nan";
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

// Returns the integer that `text` writes; none if it writes none.
std::optional<int64_t> integer_of(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

[[noreturn]] void refuse_state(const std::string& whose,
                               const std::string& why) {
  throw std::invalid_argument("the state of " + whose + " " + why +
                              ", or save in a .pt file");
}

// `level`: in how many objects and arrays a value is.
void require_level(int level, const std::string& whose) {
  if (level <= kSnapshotJsonDepth) return;
  throw std::invalid_argument(
      "the state of " + whose + " is nested in more than " +
      std::to_string(kSnapshotJsonDepth - 1) +
      " lists and dicts; let its state_dict() return a flatter one");
}

Json json_of(const StateTree& tree, int level, const std::string& whose) {
  require_level(level, whose);
  if (const auto* flag = tree.as<bool>()) return *flag;
  if (const auto* integer = tree.as<int64_t>()) return *integer;
  if (const auto* number = tree.as<double>()) return json_number(*number);
  if (const auto* text = tree.as<std::string>()) {
    if (is_text_of_number(*text)) {
      refuse_state(whose,
                   "has the text \"" + *text +
                       "\", which is a number in JSON; give another text");
    }
    return *text;
  }
  if (const auto* list = tree.as<StateTree::List>()) {
    Json json = Json::array();
    for (const StateTree& item : *list)
      json.push_back(json_of(item, level + 1, whose));
    return json;
  }
  if (const auto* dict = tree.as<StateTree::Dict>()) {
    Json json = Json::object();
    for (const auto& [name, item] : dict->items) {
      if (integer_of(name)) {
        refuse_state(whose,
                     "has a dict with the name \"" + name +
                         "\", and a dict with integers as names is a Counter "
                         "in JSON; give it other names");
      }
      json[name] = json_of(item, level + 1, whose);
    }
    return json;
  }
  if (const auto* counter = tree.as<StateTree::Counter>()) {
    Json json = Json::object();
    for (const auto& [key, count] : *counter) {
      require_level(level + 1, whose);
      json[std::to_string(key)] = count;
    }
    return json;
  }
  return nullptr;
}

// An object whose first key is an integer is a Counter.
StateTree tree_of(const Json& json) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) {
    const auto text = json.get<std::string>();
    if (is_text_of_number(text)) return double_of(json);
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

}  // namespace

Json numbers_of(const Snapshot& snapshot) {
  Json json = {{"epochs_run", snapshot.epochs_run},
               {"step", snapshot.step},
               {"sampler_state", snapshot.sampler_state},
               {"metadata", snapshot.metadata}};
  if (snapshot.scheduler_state) {
    json["scheduler_state"] = scheduler_json(*snapshot.scheduler_state);
  }
  return json;
}

Snapshot without_numbers() {
  return {.absent = {"epochs_run", "step", "sampler_state", "metadata"}};
}

std::set<std::string> still_absent(const Snapshot& snapshot) {
  std::set<std::string> absent = snapshot.absent;
  const Snapshot unset;
  if (snapshot.epochs_run != unset.epochs_run) absent.erase("epochs_run");
  if (snapshot.step != unset.step) absent.erase("step");
  if (!snapshot.sampler_state.empty()) absent.erase("sampler_state");
  if (!snapshot.metadata.empty()) absent.erase("metadata");
  return absent;
}

Json scheduler_json(const StateTree& state) {
  if (!state.as<StateTree::Dict>()) {
    throw std::invalid_argument(
        "the scheduler's state is not a dict; let its state_dict() return one");
  }
  return json_of(state, 1, "the scheduler");
}

Json item_json(const std::string& name, const StateTree& values) {
  constexpr int kLevelOfItems = 4;  // in a manifest
  return json_of(values, kLevelOfItems, "the item \"" + name + "\"");
}

StateTree item_values_of(const Json& json) { return tree_of(json); }

void order_tensors(NamedTensors& tensors,
                   const std::vector<std::string>& names) {
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < names.size(); ++i) places.emplace(names[i], i);
  const auto place_of = [&](const auto& tensor) {
    const auto found = places.find(tensor.first);
    return found == places.end() ? names.size() : found->second;
  };
  std::stable_sort(
      tensors.begin(), tensors.end(),
      [&](const auto& a, const auto& b) { return place_of(a) < place_of(b); });
}

void take_numbers(const Json& json, Snapshot& snapshot) {
  snapshot.epochs_run = json.at("epochs_run").get<int64_t>();
  snapshot.step = json.at("step").get<int64_t>();
  snapshot.sampler_state = json.at("sampler_state").get<SamplerState>();
  snapshot.metadata =
      json.at("metadata").get<std::map<std::string, std::string>>();
  if (!json.contains("scheduler_state")) return;
  const Json& stored = json.at("scheduler_state");
  if (!stored.is_object()) {
    throw std::runtime_error("the scheduler's state is not an object");
  }
  StateTree tree = tree_of(stored);
  if (!tree.as<StateTree::Dict>()) {
    throw std::runtime_error("the scheduler's state is not an object by names");
  }
  snapshot.scheduler_state = std::move(tree);
}

Json split_tensors(const std::map<std::string, StateValue>& values,
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
      json[name] = json_number(*number);
    } else if (const auto* list = std::get_if<std::vector<double>>(&value)) {
      json[name] = Json::array();
      for (const double item : *list) json[name].push_back(json_number(item));
    } else {
      json[name] = nullptr;
    }
  }
  return json;
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

}  // namespace lockstep::internal
