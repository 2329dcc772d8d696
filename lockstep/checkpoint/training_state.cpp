#include "lockstep/checkpoint/training_state.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "lockstep/base/number_list.h"
#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/file_save.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/sharded/sharded_load.h"
#include "lockstep/checkpoint/state_items.h"
#include "lockstep/checkpoint/state_transfer.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep {
namespace {

using internal::Ranks;

struct Loaded {
  bool found = false;
  Snapshot snapshot;
  std::optional<internal::TrainingLoad> parts{};
  std::optional<at::Tensor> generator;
  nlohmann::json claims;  // null unless the training will save
};

// Does everything that can fail on this rank alone.
Loaded prepare(const std::string& path, const TrainingState& state,
               const Ranks& ranks, bool will_save) {
  Loaded loaded;
  if (will_save && ranks.rank() == 0) internal::check_can_save(path);
  if (will_save) {
    internal::check_for_file(path, state, {}, ranks.size());
    internal::require_loadable(state);
    loaded.claims = internal::file_claims_of(state);
  }
  internal::require_optimizer(state);
  try {
    loaded.snapshot = load_snapshot_file(path);
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::no_such_file_or_directory) throw;
    return loaded;
  }
  loaded.found = true;
  if (!state.model) {
    throw std::invalid_argument("TrainingState.model is not set");
  }
  try {
    loaded.parts.emplace(loaded.snapshot, state);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(path + ": " + error.what());
  }
  const auto& generators = loaded.snapshot.generator_states;
  loaded.generator = internal::generator_state_for(
      path, generators.size(), [&](size_t rank) { return generators[rank]; },
      ranks.rank(), ranks.size(), state.model.get());
  return loaded;
}

// Collective. Does prepare() on all ranks. Throws on every rank unless all have
// the same file, or none has one, and can save together.
Loaded prepare_together(const std::string& path, const TrainingState& state,
                        const Ranks& ranks, bool will_save) {
  Loaded loaded;
  const auto all = internal::gather_or_fail(
      ranks,
      [&](nlohmann::json& mine) {
        loaded = prepare(path, state, ranks, will_save);
        mine = {{"found", loaded.found},
                {"digest", loaded.snapshot.digest},
                {"claims", loaded.claims}};
      },
      internal::failed_load(path));
  std::vector<nlohmann::json> claims;
  std::vector<size_t> missing;
  std::vector<size_t> different;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].at("found").get<bool>()) missing.push_back(rank);
    if (all[rank].at("digest") != all[0].at("digest")) {
      different.push_back(rank);
    }
    claims.push_back(all[rank].at("claims"));
  }
  internal::require_same_in_file(claims);
  const std::string advice =
      "copy one file to the hosts of all ranks, or name a path that they share";
  if (!missing.empty() && missing.size() < all.size()) {
    throw SnapshotError(path,
                        "is missing on " +
                            internal::name_numbers("rank", missing) + " of " +
                            std::to_string(ranks.size()),
                        advice);
  }
  if (!different.empty()) {
    throw SnapshotError(path,
                        "is not the same file on " +
                            internal::name_numbers("rank", different) +
                            " as on rank 0",
                        advice);
  }
  return loaded;
}

// Collective if the file, which is the same on all ranks, has items. Throws on
// every rank if one fails.
void load_items(const std::string& path, Loaded& loaded, const Ranks& ranks) {
  if (loaded.snapshot.items.empty()) return;
  internal::gather_or_fail(
      ranks, [&](nlohmann::json&) { loaded.parts->apply_items(); },
      [&](const std::string& words, bool /*is_mistake*/) {
        throw SnapshotError(path, "was loaded in part: " + words,
                            "load again, or begin anew");
      });
}

// Says what of the training the file has restored.
LoadedSnapshot parts_of(const TrainingState& state, const Loaded& loaded) {
  LoadedSnapshot parts{.found = true, .restored = {"model"}};
  const auto note = [&](const std::string& name, bool has, bool is_saved) {
    if (has && is_saved) parts.restored.push_back(name);
    if (has && !is_saved) parts.not_restored.push_back(name);
    if (!has && is_saved) parts.not_used.push_back(name);
  };
  const Snapshot& snapshot = loaded.snapshot;
  note("optimizer", state.optimizer, snapshot.optimizer_state.has_value());
  note("scheduler", state.scheduler,
       snapshot.scheduler_state.has_value() ||
           !snapshot.scheduler_unreadable.empty());
  note("generator", true, loaded.generator.has_value());
  for (const auto& [name, item] : state.items) {
    note(name, true, snapshot.items.contains(name));
  }
  for (const auto& [name, item] : snapshot.items) {
    if (!state.items.contains(name)) parts.not_used.push_back(name);
  }
  return parts;
}

// A run that saves must not go on otherwise than it was in silence.
void warn_of_parts(const LoadedSnapshot& loaded) {
  std::string words;
  const auto add = [&](const char* what, const auto& names) {
    std::string list;
    for (const std::string& name : names) {
      // A file of Python's has none; dropout then draws other numbers.
      if (name != "generator") list += (list.empty() ? "" : ", ") + name;
    }
    if (!list.empty()) words += (words.empty() ? "" : "; ") + (what + list);
  };
  add("it lacks these parts of the training, which keep their values: ",
      loaded.not_restored);
  add("the training lacks these parts of it, which the next snapshot will not "
      "have: ",
      loaded.not_used);
  if (words.empty()) return;
  TORCH_WARN("lockstep: the snapshot \"", loaded.path,
             "\" was loaded in part: ", words,
             " (LoadedSnapshot::not_restored and not_used; set "
             "LoadSnapshotOptions::will_save to false in a run that only "
             "reads)");
}

}  // namespace

std::string save_snapshot(const std::string& path, const TrainingState& state,
                          const SnapshotOptions& options) {
  const internal::UserFunction function("save_snapshot()");
  const internal::Span span("snapshot", "save");
  const Ranks ranks(options.group);
  internal::SaveFiles files;
  const auto save = internal::begin_save(path, state, options, ranks, files);
  save->write();
  std::string written = save->commit(ranks);
  internal::TrainingCounters::instance().count_snapshot();
  return written;
}

LoadedSnapshot load_snapshot(const std::string& path, TrainingState& state,
                             const LoadSnapshotOptions& options) {
  const internal::UserFunction function("load_snapshot()");
  // The state comes from the other ranks, once this one has joined them.
  if (internal::groups_are_apart()) return {};
  const internal::Span span("snapshot", "load");
  const Ranks ranks(options.group);
  const bool warns = options.will_save && ranks.rank() == 0;
  if (internal::names_folder(path, ranks, !options.will_save)) {
    const auto parts = internal::load_from_folder(path, state, options, ranks);
    if (warns) warn_of_parts(parts);
    return parts;
  }
  Loaded loaded = prepare_together(path, state, ranks, options.will_save);
  if (!loaded.found) return {};
  loaded.parts->apply();
  load_items(path, loaded, ranks);
  if (loaded.generator) {
    internal::set_generator_state(*loaded.generator, state.model.get());
  }
  LoadedSnapshot parts = parts_of(state, loaded);
  internal::restore_numbers(loaded.snapshot, state, parts.not_restored);
  parts.path = path;
  if (warns) warn_of_parts(parts);
  return parts;
}

}  // namespace lockstep
