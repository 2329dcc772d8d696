#include "lockstep/amp/grad_scaler_state.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <type_traits>

namespace lockstep {

namespace {

using Json = nlohmann::json;

constexpr const char* kScale = "scale";
constexpr const char* kGrowthFactor = "growth_factor";
constexpr const char* kBackoffFactor = "backoff_factor";
constexpr const char* kGrowthInterval = "growth_interval";
constexpr const char* kGrowthTracker = "_growth_tracker";

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(
      "The state of a GradScaler " + what +
      "; give the state_dict() of an enabled scaler, or its JSON.");
}

double finite(const char* name, double number) {
  if (std::isfinite(number)) return number;
  throw std::invalid_argument(std::string("to_json: the GradScaler's ") + name +
                              " is " + std::to_string(number) +
                              ", which JSON cannot hold; it must be finite.");
}

const Json& entry(const Json& object, const char* name) {
  auto found = object.find(name);
  if (found == object.end()) refuse(std::string("has no \"") + name + '"');
  return *found;
}

double number(const Json& object, const char* name) {
  const Json& value = entry(object, name);
  if (!value.is_number()) {
    refuse(std::string("has a \"") + name + "\" that is not a number");
  }
  return value.get<double>();
}

int64_t integer(const Json& object, const char* name) {
  const Json& value = entry(object, name);
  if (!value.is_number_integer()) {
    refuse(std::string("has a \"") + name + "\" that is not an integer");
  }
  return value.get<int64_t>();
}

}  // namespace

StateTree to_state_tree(const GradScalerState& state) {
  StateTree::Dict dict;
  dict.set(kScale, state.scale);
  dict.set(kGrowthFactor, state.growth_factor);
  dict.set(kBackoffFactor, state.backoff_factor);
  dict.set(kGrowthInterval, state.growth_interval);
  dict.set(kGrowthTracker, state.growth_tracker);
  return dict;
}

void from_state_tree(const StateTree& tree, GradScalerState& state) {
  const auto* dict = tree.as<StateTree::Dict>();
  if (!dict) refuse("is not a dict");
  const auto read = [&](const char* name, auto& to) {
    using Number = std::remove_reference_t<decltype(to)>;
    const StateTree* found = dict->find(name);
    if (!found) refuse(std::string("has no \"") + name + '"');
    if (const auto* number = found->as<Number>()) {
      to = *number;
    } else {
      refuse(std::string("has a \"") + name + "\" of another type");
    }
  };
  read(kScale, state.scale);
  read(kGrowthFactor, state.growth_factor);
  read(kBackoffFactor, state.backoff_factor);
  read(kGrowthInterval, state.growth_interval);
  read(kGrowthTracker, state.growth_tracker);
}

std::string to_json(const GradScalerState& state) {
  Json object = {
      {kScale, finite(kScale, state.scale)},
      {kGrowthFactor, finite(kGrowthFactor, state.growth_factor)},
      {kBackoffFactor, finite(kBackoffFactor, state.backoff_factor)},
      {kGrowthInterval, state.growth_interval},
      {kGrowthTracker, state.growth_tracker},
  };
  return object.dump();
}

GradScalerState grad_scaler_state_from_json(std::string_view text) {
  Json object = Json::parse(text.begin(), text.end(), /*cb=*/nullptr,
                            /*allow_exceptions=*/false);
  if (!object.is_object()) refuse("is not a JSON object");
  return {.scale = number(object, kScale),
          .growth_factor = number(object, kGrowthFactor),
          .backoff_factor = number(object, kBackoffFactor),
          .growth_interval = integer(object, kGrowthInterval),
          .growth_tracker = integer(object, kGrowthTracker)};
}

}  // namespace lockstep
