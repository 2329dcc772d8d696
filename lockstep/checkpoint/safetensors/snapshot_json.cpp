#include "lockstep/checkpoint/safetensors/snapshot_json.h"

#include <cmath>
#include <limits>
#include <stdexcept>

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

double double_of(const Json& json) {
  if (!json.is_string()) return json.get<double>();
  const auto text = json.get<std::string>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (text == "inf") return kInfinity;
  if (text == "-inf") return -kInfinity;
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  throw std::runtime_error("\"" + text + "\" is not a number");
}

}  // namespace

Json numbers_of(const Snapshot& snapshot) {
  return {{"epochs_run", snapshot.epochs_run},
          {"step", snapshot.step},
          {"sampler_state", snapshot.sampler_state},
          {"metadata", snapshot.metadata}};
}

void take_numbers(const Json& json, Snapshot& snapshot) {
  snapshot.epochs_run = json.at("epochs_run").get<int64_t>();
  snapshot.step = json.at("step").get<int64_t>();
  snapshot.sampler_state = json.at("sampler_state").get<SamplerState>();
  snapshot.metadata =
      json.at("metadata").get<std::map<std::string, std::string>>();
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
