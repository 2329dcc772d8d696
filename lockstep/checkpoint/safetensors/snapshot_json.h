#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"

// The values of a snapshot beside its tensors, as JSON: in the header of a
// single safetensors file, and in the manifest of a folder.
namespace lockstep::internal {

// Returns an object with the members epochs_run, step, sampler_state, metadata
// and, if there is one, scheduler_state. Throws what scheduler_json() throws.
nlohmann::json numbers_of(const Snapshot& snapshot);

// Returns a scheduler's state as JSON. Throws std::invalid_argument for what
// take_numbers() would give back as something else, or not at all: a dict with
// an integer as a name, which would be a Counter; the texts "inf", "-inf" and
// "nan", which would be numbers; a state that is not a dict, or is nested too
// deeply. (An empty Counter comes back as an empty dict.)
nlohmann::json scheduler_json(const StateTree& state);

// The same for the values of the item `name`, which need not be a dict.
nlohmann::json item_json(const std::string& name, const StateTree& values);
// Reads such JSON. Throws std::runtime_error or a JSON error.
StateTree item_values_of(const nlohmann::json& json);

// Brings an item's tensors into the order of `names`. Those that have no name
// there come last and keep their order.
void order_tensors(NamedTensors& tensors,
                   const std::vector<std::string>& names);

// How deeply JSON with these members may be nested: a scheduler in a scheduler
// in a scheduler needs ten levels.
inline constexpr int kSnapshotJsonDepth = 32;

// Sets these members from such an object. Throws std::runtime_error or a JSON
// error if one is missing or has another type.
void take_numbers(const nlohmann::json& json, Snapshot& snapshot);

// Returns what files without these members have.
Snapshot without_numbers();
// Returns those of Snapshot::absent that have not been set since.
std::set<std::string> still_absent(const Snapshot& snapshot);

// Moves tensors into `tensors`, under `prefix`, and returns the rest as JSON.
// Numbers that are not finite are the texts "inf", "-inf" and "nan".
nlohmann::json split_tensors(const std::map<std::string, StateValue>& values,
                             const std::string& prefix, NamedTensors& tensors);

// Returns the values in such an object. Throws std::runtime_error or a JSON
// error.
std::map<std::string, StateValue> values_of(const nlohmann::json& json);

}  // namespace lockstep::internal
