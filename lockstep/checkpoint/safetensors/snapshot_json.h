#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/checkpoint/snapshot.h"

// What a snapshot holds beside tensors, as JSON: in the header of a single
// safetensors file, and in the manifest of a folder.
namespace lockstep::internal {

// Returns an object with the members epochs_run, step, sampler_state and
// metadata.
nlohmann::json numbers_of(const Snapshot& snapshot);

// Sets these members from such an object. Throws a JSON error if one is
// missing or has another type.
void take_numbers(const nlohmann::json& json, Snapshot& snapshot);

// Moves tensors into `tensors`, under `prefix`, and returns the rest as JSON.
// Numbers that are not finite are the texts "inf", "-inf" and "nan".
nlohmann::json split_tensors(const std::map<std::string, StateValue>& values,
                             const std::string& prefix, NamedTensors& tensors);

// Returns the values in such an object. Throws std::runtime_error or a JSON
// error.
std::map<std::string, StateValue> values_of(const nlohmann::json& json);

}  // namespace lockstep::internal
