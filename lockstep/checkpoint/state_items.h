#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/sharded/manifest.h"
#include "lockstep/checkpoint/training_state.h"

// The items of a TrainingState, in files and in folders.
namespace lockstep::internal {

// Throws std::invalid_argument for an item whose name a snapshot cannot have.
void require_item_names(const TrainingState& state);

inline constexpr const char* kOptimizerKind = "an optimizer";

// Returns the kinds of the items ("a module"), by name.
nlohmann::json kinds_of_items(const TrainingState& state);

// Throws std::invalid_argument unless all ranks have items of the same names
// and kinds. `all`: the kinds_of_items() of all ranks, in rank order; null for
// a rank that takes no part.
void require_same_items(const std::vector<nlohmann::json>& all);

// Returns TrainingState::model or the module of an item, whichever has all of
// the optimizer's parameters. Throws std::invalid_argument if none has.
const torch::nn::Module& module_of_optimizer(const TrainingState& state,
                                             const std::string& item,
                                             const OptimizerShards::State& own);

// Throws std::invalid_argument if a snapshot of the model, or of an item that
// is a module, could not be loaded into it again.
void require_loadable(const TrainingState& state);

// Convert an optimizer's groups, and OptimizerState::averager_step, to the
// values of an item, and back. Throw std::invalid_argument for an option that
// is a tensor; std::runtime_error if the values are not groups.
StateTree values_of_groups(const std::vector<NamedGroup>& groups,
                           std::optional<int64_t> averager_step);
std::vector<NamedGroup> groups_of_values(const StateTree& values);
std::optional<int64_t> averager_step_of(const StateTree& values);

// Returns what a file holds of the items; without `objects`, only of those that
// are modules and optimizers. Of what is divided over ranks it is this rank's
// part, which files refuse.
std::map<std::string, ItemState> items_for_file(const TrainingState& state,
                                                bool objects);

// Makes every check for restoring a sharded optimizer from this rank's part of
// its state, which is by the parameters' numbers. Throws std::invalid_argument.
std::unique_ptr<PreparedOptimizer> prepare_shards(OptimizerShards& optimizer,
                                                  OptimizerState state);

// Sets the numbers of `state` to those that were saved. Adds the names of those
// that the file lacks, which stay as they are, to `not_restored`.
void restore_numbers(const Snapshot& saved, TrainingState& state,
                     std::vector<std::string>& not_restored);

// Calls `prepare`, which makes the checks for restoring an item. What it throws
// for a state that does not fit, std::invalid_argument or std::runtime_error,
// becomes a std::invalid_argument that names the item.
void with_name_of_item(const std::string& name,
                       const std::function<void()>& prepare);

// Makes every check for restoring an item from a file, and returns what
// restores it. Throws std::invalid_argument.
std::function<void()> prepare_item(const TrainingState& state,
                                   const std::string& name,
                                   const StateItem& item,
                                   const ItemState& saved);

}  // namespace lockstep::internal
