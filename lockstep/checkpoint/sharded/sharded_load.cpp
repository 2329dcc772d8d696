#include "lockstep/checkpoint/sharded/sharded_load.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <system_error>
#include <unordered_map>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/checkpoint/sharded/sharded_save.h"
#include "lockstep/checkpoint/sharded/snapshot_folder.h"
#include "lockstep/checkpoint/sharded/state_shards.h"
#include "lockstep/checkpoint/sharded/tensor_reader.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/checkpoint/state_items.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {

std::string model_prefix(const TensorFiles& files,
                         const torch::nn::Module* module) {
  if (files.manifest()) return kModelPrefix;
  if (!files.is_distributed()) return "";
  bool only_known = true;
  bool has_optimizer = false;
  for (const auto& [name, tensor] : files.tensors()) {
    const bool of_optimizer = name.starts_with(kOptimizerPrefix);
    has_optimizer = has_optimizer || of_optimizer;
    only_known = only_known && (of_optimizer || name.starts_with(kModelPrefix));
  }
  if (!only_known) return "";
  if (has_optimizer || !module) return has_optimizer ? kModelPrefix : "";
  const auto own = tensors_of(*module);
  const bool same = std::any_of(own.begin(), own.end(), [](const auto& tensor) {
    return tensor.name.starts_with(kModelPrefix);
  });
  return same ? "" : kModelPrefix;
}

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Returns the names of the model's tensors, without the prefix.
std::vector<std::string> model_names(const TensorFiles& files,
                                     const std::string& prefix) {
  std::vector<std::string> names = files.names_under(prefix);
  if (prefix.empty()) {
    // Other items that a folder of PyTorch's, or a single file of ours, may
    // hold.
    std::erase_if(names, [&](const std::string& name) {
      return (files.is_distributed() && name.starts_with(kOptimizerPrefix)) ||
             name.starts_with("lockstep.");
    });
  }
  return names;
}

// The tensors of a model in files, and those of a module that they are loaded
// into.
class ModelTargets {
 public:
  // `prefix`: of the module's tensors in the files. Throws what
  // load_state_dict() throws.
  ModelTargets(const TensorFiles& files, const torch::nn::Module& module,
               const std::string& prefix, const Renaming& renaming,
               const LoadStateDictOptions& options) {
    NamedTensors given;
    for (const std::string& name : model_names(files, prefix)) {
      given.emplace_back(name,
                         without_memory(files.tensors().at(prefix + name)));
      names_[given.back().second.unsafeGetTensorImpl()] = prefix + name;
      kept_.push_back(given.back().second);
    }
    load_ = check_state_dict(module, renaming.apply(std::move(given)), options);
  }

  void add_to(TensorReader& reader) const {
    const auto last = last_names();
    for (size_t i = 0; i < load_.copies.size(); ++i) {
      const auto& [from, to] = load_.copies[i];
      const std::string& name = names_.at(from.unsafeGetTensorImpl());
      if (to.numel() == 0) continue;
      if (last.at(memory_of(to)) == i) {
        reader.add({name, whole_shape(to), placement_of(to), to});
      } else {
        reader.add_to_verify(name);
      }
    }
  }

  // Gives the module's tensors the files' memory.
  void map(const TensorFiles& files) const {
    std::vector<std::string> names;
    for (const auto& [from, to] : load_.copies) {
      names.push_back(names_.at(from.unsafeGetTensorImpl()));
      if (layout_of(to) != nullptr) {
        throw std::invalid_argument(
            "the module's " + names.back() +
            " is a part of a tensor that is divided over ranks, which cannot "
            "be a view of a file; leave LoadModelOptions::mmap out");
      }
    }
    const auto mapped = map_tensors(files, names);
    const auto last = last_names();
    std::vector<size_t> sources;  // before the first tensor gets other memory
    for (const auto& [from, to] : load_.copies) {
      sources.push_back(last.at(memory_of(to)));
    }
    for (size_t i = 0; i < mapped.size(); ++i) {
      const at::Tensor& to = load_.copies[i].second;
      if (to.numel() == 0) continue;
      to.set_data(mapped[sources[i]].to(to.device(), to.scalar_type()));
    }
  }

  const IncompatibleKeys& incompatible() const { return load_.incompatible; }

 private:
  // Two names may stand for the same memory (tied weights). Returns, by memory,
  // the last of them in load_.copies: it counts, as if the tensors were copied
  // one after the other.
  std::map<TensorMemory, size_t> last_names() const {
    std::map<TensorMemory, size_t> last;
    for (size_t i = 0; i < load_.copies.size(); ++i) {
      last[memory_of(load_.copies[i].second)] = i;
    }
    return last;
  }

  // The names in the files, by the tensors that stand for them in `load_`.
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
  std::vector<at::Tensor> kept_;
  ModuleLoad load_;
};

bool has_optimizer_state(const TensorFiles& files) {
  if (files.manifest()) return files.manifest()->param_groups.has_value();
  return !files.names_under(kStatePrefix).empty();
}

// Returns the values that the files have for a parameter: those under
// `prefix` whose names have no further dot.
std::vector<std::string> keys_under(const TensorFiles& files,
                                    const std::string& prefix) {
  std::vector<std::string> keys = files.names_under(prefix);
  std::erase_if(keys, [](const std::string& key) {
    return key.find('.') != std::string::npos;
  });
  return keys;
}

// Returns what to say of the state of the optimizer that is the item `item`, or
// of TrainingState::optimizer if that is empty.
std::string misfit_of(const std::string& item, const std::string& why) {
  return (item.empty() ? "the snapshot's optimizer state"
                       : "the item \"" + item + "\" of the snapshot") +
         " does not fit: " + why +
         "; build the optimizer that was saved, or start without its state";
}

[[noreturn]] void refuse_optimizer(const std::string& item,
                                   const std::string& why) {
  throw std::invalid_argument(misfit_of(item, why));
}

// Names of parameters for which the snapshot has state of an optimizer, and
// which this optimizer lacks on a rank, with the words to say if it lacks them
// on all ranks. Ranks may be stages of a pipeline, so others may have them.
using Foreign = std::map<std::string, std::string>;

// The parameters of a module, by all their names, and those of them that are
// the optimizer's.
class KnownParameters {
 public:
  // `item`: as in misfit_of().
  KnownParameters(const OptimizerShards::State& own,
                  const torch::nn::Module& module, std::string item)
      : item_(std::move(item)) {
    for (const ModuleTensor& tensor : tensors_of(module)) {
      if (tensor.is_parameter) {
        by_name_[tensor.name] = tensor.tensor.unsafeGetTensorImpl();
      }
    }
    for (const at::Tensor& parameter : own.parameters) {
      stepped_.insert(parameter.unsafeGetTensorImpl());
    }
  }

  // Deals with a name that is not the first one of a parameter of the
  // optimizer. A further name of a tied parameter is nothing to say. Throws for
  // a parameter of the module that the optimizer lacks.
  void add_foreign(const std::string& name, const std::string& why,
                   Foreign& foreign) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) {
      foreign.emplace(name, misfit_of(item_, why));
    } else if (!stepped_.contains(found->second)) {
      refuse_optimizer(item_, why);
    }
  }

 private:
  std::string item_;
  std::map<std::string, const c10::TensorImpl*> by_name_;
  std::set<const c10::TensorImpl*> stepped_;
};

// Returns the hyperparameters that a folder of PyTorch's has for a parameter.
std::map<std::string, at::Tensor> options_of(const TensorFiles& files,
                                             const std::string& parameter) {
  const std::string prefix = kOptionPrefix + parameter + ".";
  std::map<std::string, at::Tensor> options;
  for (const std::string& key : keys_under(files, prefix)) {
    options[key] = read_tensor(files, prefix + key).to(at::kDouble);
  }
  return options;
}

// Returns those of a group, which must be the same for all its parameters.
// State that was saved for none of them is missing.
std::map<std::string, at::Tensor> options_of(const TensorFiles& files,
                                             size_t number,
                                             const NamedGroup& group) {
  std::map<std::string, at::Tensor> options;
  std::string first;
  for (const std::string& name : group.params) {
    if (name.empty()) continue;
    auto own = options_of(files, name);
    if (own.empty()) continue;
    if (first.empty()) {
      first = name;
      options = std::move(own);
      continue;
    }
    const auto different = std::ranges::find_if(options, [&](const auto& one) {
      const auto found = own.find(one.first);
      return found == own.end() || !found->second.equal(one.second);
    });
    if (different == options.end()) continue;
    refuse_optimizer("", "the optimizer's group " + std::to_string(number) +
                             " has " + first + " and " + name +
                             ", which were saved with different " +
                             different->first + ", in two groups");
  }
  return options;
}

// An optimizer that is to be restored, and what the files have of it.
struct OptimizerToLoad {
  std::string item;  // its name; "" for TrainingState::optimizer
  torch::optim::Optimizer& optimizer;
  const OptimizerShards::State& own;
  const torch::nn::Module& module;
  std::string prefix;  // of its state's tensors
  // The groups that the manifest has; null without a manifest.
  const std::vector<NamedGroup>* listed;
  std::optional<int64_t> averager_step;
  // The further names of the module's parameters when they were saved, each
  // with its first.
  std::map<std::string, std::string> tied;
};

// Returns the saved hyperparameters, with this optimizer's numbers of the
// parameters. A folder of PyTorch's, which has no manifest, may have some of
// them as tensors ("optimizer.param_groups.0.weight.lr"); this optimizer keeps
// the others.
OptimizerState saved_groups(const TensorFiles& files,
                            const OptimizerToLoad& to_load,
                            const std::vector<NamedGroup>& own_names,
                            const KnownParameters& parameters,
                            Foreign& foreign) {
  OptimizerState groups = to_load.own.groups;
  if (to_load.listed) {
    const auto& saved = *to_load.listed;
    if (saved.size() != own_names.size()) {
      refuse_optimizer(to_load.item,
                       "it has " + std::to_string(saved.size()) +
                           " parameter groups, the optimizer has " +
                           std::to_string(own_names.size()));
    }
    for (size_t g = 0; g < saved.size(); ++g) {
      const auto names_in = [](const std::vector<std::string>& names) {
        return std::set<std::string>(names.begin(), names.end());
      };
      const auto theirs = names_in(saved[g].params);
      const auto ours = names_in(own_names[g].params);
      for (const std::string& name : ours) {
        if (!theirs.contains(name)) {
          refuse_optimizer(to_load.item,
                           "its group " + std::to_string(g) + " lacks " + name);
        }
      }
      for (const std::string& name : theirs) {
        if (ours.contains(name)) continue;
        parameters.add_foreign(name,
                               "its group " + std::to_string(g) + " has " +
                                   name + ", the optimizer's does not",
                               foreign);
      }
      groups.param_groups[g].options = saved[g].options;
    }
    return groups;
  }
  for (size_t g = 0; g < own_names.size(); ++g) {
    for (const auto& [key, value] : options_of(files, g, own_names[g])) {
      auto& option = groups.param_groups[g].options[key];
      if (value.dim() == 0) {
        option = value.item<double>();
      } else if (value.dim() == 1) {
        const auto* numbers = value.const_data_ptr<double>();
        option = std::vector<double>(numbers, numbers + value.numel());
      }
    }
  }
  return groups;
}

// Makes tensors for the state that this rank loads, which `reader` will fill,
// and checks whether they fit the optimizer.
std::unique_ptr<PreparedOptimizer> prepare_optimizer(
    const TensorFiles& files, const OptimizerToLoad& to_load, bool checksums,
    TensorReader& reader, Foreign& foreign) {
  const auto& [item, optimizer, own, module, state_prefix, listed,
               averager_step, tied] = to_load;
  std::vector<std::string> names = names_of(own, module);
  std::vector<NamedGroup> own_groups = named_groups(own, module);
  // A parameter that was tied to another when it was saved has no state under
  // its own name.
  const auto use_saved_name = [&](std::string& name) {
    const auto found = tied.find(name);
    if (found != tied.end()) name = found->second;
  };
  for (std::string& name : names) use_saved_name(name);
  for (NamedGroup& group : own_groups) {
    for (std::string& name : group.params) use_saved_name(name);
  }
  const KnownParameters parameters(own, module, item);
  const OptimizerState groups =
      saved_groups(files, to_load, own_groups, parameters, foreign);
  size_t known = 0;
  for (const std::string& name : names) {
    known += keys_under(files, state_prefix + name + ".").size();
  }
  const auto all = files.names_under(state_prefix);
  if (known != all.size()) {
    const std::set<std::string> own_names(names.begin(), names.end());
    for (const std::string& name : all) {
      const std::string of = name.substr(0, name.rfind('.'));
      if (!own_names.contains(of)) {
        parameters.add_foreign(
            of,
            "it has state for " + of +
                ", which is not a parameter of the optimizer",
            foreign);
      }
    }
  }
  OptimizerState local;
  for (size_t i = 0; i < own.parts.size(); ++i) {
    const OptimizerShards::Part& part = own.parts[i];
    const auto number = static_cast<size_t>(part.parameter);
    const at::Tensor& parameter = own.parameters[number];
    const std::string prefix = state_prefix + names[number] + ".";
    for (const std::string& key : keys_under(files, prefix)) {
      const std::string name = prefix + key;
      at::Tensor value;
      if (files.tensors().at(name).shape.empty()) {
        // Small, and looked at before anything is changed: a count of steps.
        value = read_tensor(files, name, checksums);
        if (!part.whole && key != "step") value = value.view({1});
      } else {
        value = part.whole
                    ? at::empty_like(parameter, at::MemoryFormat::Preserve)
                    : at::empty({part.range.size()}, parameter.options());
        reader.add({name, whole_shape(parameter), placement_of(part, parameter),
                    value});
      }
      local.state[static_cast<int64_t>(i)][key] = std::move(value);
    }
  }
  if (auto* sharded = dynamic_cast<OptimizerShards*>(&optimizer)) {
    return sharded->prepare_load(groups, local);
  }
  local.param_groups = groups.param_groups;
  local.averager_step = averager_step;
  return std::make_unique<OptimizerLoad>(optimizer, local, /*adopt=*/true);
}

std::optional<at::Tensor> prepare_generator(const TensorFiles& files,
                                            const Ranks& ranks, bool checksums,
                                            const torch::nn::Module* model) {
  const auto saved = files.names_under(kGeneratorPrefix);
  return generator_state_for(
      files.path(), saved.size(),
      [&](size_t rank) {
        const std::string name = kGeneratorPrefix + std::to_string(rank);
        if (!files.tensors().contains(name)) {
          throw SnapshotError(files.path(),
                              "is damaged: it has no \"" + name + "\"");
        }
        return read_tensor(files, name, checksums);
      },
      ranks.rank(), ranks.size(), model);
}

StateTree saved_scheduler(const Manifest& manifest) {
  Snapshot snapshot;
  snapshot.scheduler_state = manifest.numbers.scheduler_state;
  if (manifest.param_groups) {
    auto& groups = snapshot.optimizer_state.emplace().param_groups;
    for (const NamedGroup& group : *manifest.param_groups) {
      groups.push_back({.options = group.options, .params = {}});
    }
  }
  return scheduler_state_of(snapshot);
}

// A snapshot that was verified and fits this rank's model and optimizer.
struct ReadySnapshot {
  std::unique_ptr<TensorFiles> files;
  std::unique_ptr<TensorReader> reader;
  std::vector<std::unique_ptr<PreparedOptimizer>> optimizers;
  std::function<void()> scheduler;
  std::vector<std::function<void()>> objects;  // which may throw
  std::optional<at::Tensor> generator;
  // The items that this rank lacks, and another must have.
  std::vector<std::string> foreign_tensors;
  // Those of each optimizer that this rank restores, by its prefix.
  std::map<std::string, Foreign> foreign_parameters;
  LoadedSnapshot parts;  // which were restored and which were not
};

// kDamaged: this snapshot cannot be used, but an older one may be.
enum class Readiness { kReady, kDamaged, kFailed };

class FolderLoad {
 public:
  FolderLoad(const std::string& path, TrainingState& state,
             const LoadSnapshotOptions& options, const Ranks& ranks)
      : path_(folder_of_path(path)),
        state_(state),
        options_(options),
        ranks_(ranks) {}

  LoadedSnapshot run() {
    find_optimizers();
    const std::vector<std::string> candidates = list_candidates();
    LoadedSnapshot result;
    for (const std::string& candidate : candidates) {
      prepare(candidate);
      std::string damage = agree(candidate);
      if (!damage.empty()) {
        result.skipped.push_back(std::move(damage));
        continue;
      }
      take_over();
      ready_.parts.found = true;
      ready_.parts.path = candidate;
      ready_.parts.skipped = std::move(result.skipped);
      return ready_.parts;
    }
    if (candidates.empty()) return result;
    if (failure_ && candidates.size() == 1) std::rethrow_exception(failure_);
    throw SnapshotError(
        path_,
        candidates.size() == 1
            ? "was loaded by no rank: " + result.skipped.front()
            : "has " + std::to_string(candidates.size()) +
                  " snapshots, none of which can be loaded; the newest: " +
                  result.skipped.front(),
        "");
  }

 private:
  // Comes first, because it may be collective.
  void find_optimizers() {
    try {
      if (state_.optimizer) optimizer_ = optimizer_state_of(*state_.optimizer);
      for (const auto& [name, item] : state_.items) {
        if (!item.optimizer()) continue;
        optimizers_.emplace(name, optimizer_state_of(*item.optimizer()));
      }
    } catch (const std::invalid_argument&) {
      // This optimizer cannot be saved. A run that only reads need not know,
      // if there is no state to load.
      optimizer_failure_ = std::current_exception();
    }
  }

  void list_own_candidates(Json& mine) {
    if (options_.will_save) {
      mine["claims"] = claims_before_training(state_, {});
      require_loadable(state_);
      if (optimizer_failure_) std::rethrow_exception(optimizer_failure_);
    }
    if (ranks_.rank() != 0) return;
    mine["candidates"] = Json::array();
    if (options_.will_save) check_can_save_in(path_);
    for (const SnapshotEntry& entry : snapshots_in(path_)) {
      mine["candidates"].push_back(entry.path);
      std::error_code ignored;
      if (!fs::is_directory(entry.path, ignored)) {
        mine["lost_links"].push_back(entry.path);
      }
    }
    if (mine["candidates"].empty() && holds_tensors(path_)) {
      mine["candidates"].push_back(path_);
    }
  }

  // Returns the snapshots to try, newest first; the same on all ranks.
  std::vector<std::string> list_candidates() {
    const auto all = gather_or_fail(
        ranks_, [&](Json& mine) { list_own_candidates(mine); },
        failed_load(path_));
    std::vector<Json> claims;
    for (const Json& rank : all) {
      if (rank.contains("claims")) claims.push_back(rank.at("claims"));
    }
    // A rank that will not save has none.
    if (claims.size() == all.size() && !ranks_.are_imagined()) {
      require_same_training(claims);
    }
    lost_links_ = all.front().value("lost_links", std::set<std::string>());
    return all.front().at("candidates").get<std::vector<std::string>>();
  }

  // Does everything that can fail on this rank alone.
  void prepare(const std::string& candidate) {
    ready_ = {};
    failure_ = nullptr;
    readiness_ = Readiness::kFailed;
    std::error_code error;
    if (!fs::is_directory(candidate, error) &&
        !lost_links_.contains(candidate)) {
      failure_ = std::make_exception_ptr(SnapshotError(
          candidate, "is missing here, but not on rank 0",
          "name a folder on a file system that all ranks share, or copy it to "
          "the hosts of all ranks"));
      return;
    }
    try {
      ready_.files = std::make_unique<TensorFiles>(TensorFiles::open_folder(
          candidate, TensorFiles::Headers::kWhenNeeded));
      ready_.reader = std::make_unique<TensorReader>(*ready_.files);
      fit(*ready_.files, *ready_.reader);
      ready_.reader->verify(options_.verify);
      readiness_ = Readiness::kReady;
    } catch (const SnapshotError&) {
      failure_ = std::current_exception();
      readiness_ = Readiness::kDamaged;
    } catch (const std::system_error& problem) {
      failure_ = std::current_exception();
      // A disk that cannot read these files may be able to read older ones.
      if (problem.code() == std::errc::io_error) {
        readiness_ = Readiness::kDamaged;
      }
    } catch (const std::invalid_argument& problem) {
      failure_ = std::make_exception_ptr(
          std::invalid_argument(candidate + ": " + problem.what()));
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  void fit(const TensorFiles& files, TensorReader& reader) {
    if (!state_.model) {
      throw std::invalid_argument("TrainingState.model is not set");
    }
    fit_module("model", *state_.model, model_prefix(files, state_.model.get()),
               "", files, reader);
    const auto& manifest = files.manifest();
    const auto tied = manifest ? manifest->tied : decltype(manifest->tied)();
    const bool has_optimizer = has_optimizer_state(files);
    if (note("optimizer", state_.optimizer, has_optimizer)) {
      if (optimizer_failure_) std::rethrow_exception(optimizer_failure_);
      ready_.optimizers.push_back(prepare_optimizer(
          files,
          {"", *state_.optimizer, *optimizer_, *state_.model, kStatePrefix,
           manifest ? &*manifest->param_groups : nullptr,
           manifest ? manifest->averager_step : std::nullopt, tied},
          options_.verify, reader, ready_.foreign_parameters[kStatePrefix]));
    }
    const bool has_scheduler =
        manifest && manifest->numbers.scheduler_state.has_value();
    if (note("scheduler", state_.scheduler, has_scheduler)) {
      ready_.scheduler =
          state_.scheduler->prepare_load(saved_scheduler(*manifest));
    }
    ready_.generator =
        prepare_generator(files, ranks_, options_.verify, state_.model.get());
    note("generator", true, ready_.generator.has_value());
    const auto saved = manifest ? manifest->items : decltype(manifest->items)();
    for (const auto& [name, item] : state_.items) {
      const auto found = saved.find(name);
      // A state of each rank fits the same number of ranks only.
      const bool fits =
          found != saved.end() &&
          found->second.per_rank == item.is_per_rank() &&
          (!item.is_per_rank() || found->second.values.size() == ranks_.size());
      if (note(name, true, fits)) {
        fit_item(name, item, found->second, files, reader);
      }
    }
    for (const auto& [name, item] : saved) {
      if (!state_.items.contains(name)) ready_.parts.not_used.push_back(name);
    }
  }

  // Returns whether a part is restored, and notes it.
  bool note(const std::string& name, bool has, bool is_saved) {
    auto& parts = ready_.parts;
    if (has || is_saved) {
      (has && is_saved ? parts.restored
       : has           ? parts.not_restored
                       : parts.not_used)
          .push_back(name);
    }
    return has && is_saved;
  }

  // `shown`: stands before the names of its tensors in errors.
  void fit_module(const std::string& part, torch::nn::Module& module,
                  const std::string& prefix, const std::string& shown,
                  const TensorFiles& files, TensorReader& reader) {
    const ModelTargets targets(files, module, prefix, {}, {.strict = false});
    IncompatibleKeys keys = targets.incompatible();
    for (auto* names : {&keys.missing_keys, &keys.unexpected_keys}) {
      for (std::string& name : *names) name.insert(0, shown);
    }
    if (!keys.missing_keys.empty()) require_same_keys(keys);
    for (std::string& name : keys.unexpected_keys) {
      ready_.foreign_tensors.push_back(std::move(name));
    }
    targets.add_to(reader);
    if (shown.empty()) note(part, true, true);
  }

  void fit_item(const std::string& name, const StateItem& item,
                const Manifest::Item& saved, const TensorFiles& files,
                TensorReader& reader) {
    const std::string prefix = name + ".";
    if (item.optimizer() && optimizer_failure_) {
      std::rethrow_exception(optimizer_failure_);
    }
    with_name_of_item(name, [&] {
      if (item.module()) {
        fit_module(name, *item.module(), prefix, prefix, files, reader);
      } else if (item.optimizer()) {
        fit_optimizer(name, *item.optimizer(), saved.values.front(), files,
                      reader);
      } else {
        fit_object(item, prefix, saved, files);
      }
    });
  }

  // The item `name` is the optimizer.
  void fit_optimizer(const std::string& name,
                     torch::optim::Optimizer& optimizer, const StateTree& saved,
                     const TensorFiles& files, TensorReader& reader) {
    const OptimizerShards::State& own = optimizers_.at(name);
    const auto& module = module_of_optimizer(state_, name, own);
    const std::string prefix = name + "." + kItemStateInfix;
    const auto groups = groups_of_values(saved);
    OptimizerToLoad to_load{
        name, optimizer, own, module, prefix, &groups, averager_step_of(saved),
        {}};
    if (&module == state_.model.get()) to_load.tied = files.manifest()->tied;
    ready_.optimizers.push_back(
        prepare_optimizer(files, to_load, options_.verify, reader,
                          ready_.foreign_parameters[prefix]));
  }

  void fit_object(const StateItem& item, std::string prefix,
                  const Manifest::Item& saved, const TensorFiles& files) {
    const size_t number = item.is_per_rank() ? ranks_.rank() : 0;
    if (item.is_per_rank()) prefix += std::to_string(number) + ".";
    ItemState state{.values = saved.values[number]};
    for (const std::string& key : files.names_under(prefix)) {
      state.tensors.emplace_back(
          key, read_tensor(files, prefix + key, options_.verify));
    }
    if (!saved.tensors.empty()) {
      order_tensors(state.tensors, saved.tensors[number]);
    }
    ready_.objects.push_back(item.prepare_load(state));
  }

  // Returns what is damaged; nothing if every rank is ready. Throws on every
  // rank if one has failed in another way, or if they have different files.
  std::string agree(const std::string& candidate) {
    const auto tell = [&](Json& mine) {
      if (readiness_ == Readiness::kFailed) std::rethrow_exception(failure_);
      if (readiness_ == Readiness::kDamaged) {
        mine["damaged"] = words_of(failure_);
        return;
      }
      mine["digest"] = ready_.files->digest();
      mine["foreign_tensors"] = ready_.foreign_tensors;
      mine["stages"] = stages_of(*state_.model, /*buffers=*/false);
      mine["foreign_parameters"] = ready_.foreign_parameters;
    };
    const auto all = gather_or_fail(ranks_, tell, failed_load(path_));
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (!all[rank].contains("damaged")) continue;
      const auto words = all[rank].at("damaged").get<std::string>();
      return all.size() == 1 ? words
                             : "rank " + std::to_string(rank) + ": " + words;
    }
    for (size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank].at("digest") == all[0].at("digest")) continue;
      throw SnapshotError(
          candidate,
          "is not the same on rank " + std::to_string(rank) + " as on rank 0",
          "copy one snapshot to the hosts of all ranks, or "
          "name a path that they share");
    }
    require_owners(candidate, all);
    return "";
  }

  // Throws on every rank if there is something in the snapshot that no rank
  // has, or if ranks have different parameters under one name.
  void require_owners(const std::string& candidate,
                      const std::vector<Json>& all) const {
    try {
      std::vector<Json> stages;
      for (const Json& rank : all) stages.push_back(rank.at("stages"));
      require_names_differ(stages);
      std::vector<std::string> orphans =
          all.front().at("foreign_tensors").get<std::vector<std::string>>();
      for (const Json& rank : all) {
        const auto foreign =
            rank.at("foreign_tensors").get<std::set<std::string>>();
        std::erase_if(orphans, [&](const std::string& name) {
          return !foreign.contains(name);
        });
      }
      require_same_keys({.missing_keys = {}, .unexpected_keys = orphans});
      std::map<std::string, Foreign> by_optimizer;
      for (const Json& rank : all) {
        for (const auto& [prefix, json] :
             rank.at("foreign_parameters").items()) {
          const auto foreign = json.get<Foreign>();
          Foreign& parameters =
              by_optimizer.try_emplace(prefix, foreign).first->second;
          std::erase_if(parameters, [&](const auto& name_and_why) {
            return !foreign.contains(name_and_why.first);
          });
        }
      }
      for (const auto& [prefix, parameters] : by_optimizer) {
        if (parameters.empty()) continue;
        throw std::invalid_argument(parameters.begin()->second);
      }
    } catch (const std::invalid_argument& problem) {
      throw std::invalid_argument(candidate + ": " + problem.what());
    }
  }

  void take_over() {
    gather_or_fail(
        ranks_,
        [&](Json&) {
          ready_.reader->read();
          for (const auto& optimizer : ready_.optimizers) optimizer->apply();
          if (ready_.scheduler) ready_.scheduler();
          for (const auto& load : ready_.objects) load();
        },
        [&](const std::string& words, bool is_mistake) {
          failed_load(path_)(words +
                                 " (it was verified before; model and "
                                 "optimizer are now partly overwritten: load "
                                 "again)",
                             is_mistake);
        });
    if (ready_.generator) {
      set_generator_state(*ready_.generator, state_.model.get());
    }
    const auto& manifest = ready_.files->manifest();
    restore_numbers(manifest ? manifest->numbers : without_numbers(), state_,
                    ready_.parts.not_restored);
  }

  const std::string path_;
  TrainingState& state_;
  const LoadSnapshotOptions& options_;
  const Ranks& ranks_;
  std::optional<OptimizerShards::State> optimizer_;
  std::map<std::string, OptimizerShards::State> optimizers_;  // of items
  std::exception_ptr optimizer_failure_;

  // The next three are about the snapshot that is tried.
  // The candidates that rank 0 does not find, either.
  std::set<std::string> lost_links_;
  ReadySnapshot ready_;
  Readiness readiness_ = Readiness::kFailed;
  std::exception_ptr failure_;
};

}  // namespace

LoadedSnapshot load_from_folder(const std::string& path, TrainingState& state,
                                const LoadSnapshotOptions& options,
                                const Ranks& ranks) {
  return FolderLoad(path, state, options, ranks).run();
}

std::optional<TensorFiles> open_weights(const std::string& path, bool mmap) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    return TensorFiles::open_folder(snapshot_at(path));
  }
  if (fs::path(path).extension() == ".json" && fs::exists(path, error)) {
    return TensorFiles::open_index(path);
  }
  if (mmap && fs::is_regular_file(path, error)) {
    return TensorFiles::open_file(path);
  }
  return std::nullopt;
}

NamedTensors read_weights(const TensorFiles& files) {
  const std::string prefix = model_prefix(files, nullptr);
  NamedTensors tensors;
  TensorReader reader(files);
  for (const std::string& name : model_names(files, prefix)) {
    const TensorFiles::Tensor& tensor = files.tensors().at(prefix + name);
    at::Tensor target =
        at::empty(tensor.shape, at::TensorOptions().dtype(tensor.dtype));
    reader.add({prefix + name, tensor.shape, Replicate{}, target});
    tensors.emplace_back(name, std::move(target));
  }
  reader.verify(true);
  reader.read();
  return tensors;
}

IncompatibleKeys load_weights(const TensorFiles& files,
                              torch::nn::Module& module,
                              const LoadModelOptions& options) {
  const ModelTargets targets(
      files, module, model_prefix(files, &module), options.rename,
      {.strict = options.strict, .convert = options.convert});
  if (options.mmap) {
    targets.map(files);
  } else {
    TensorReader reader(files);
    targets.add_to(reader);
    reader.verify(true);
    reader.read();
  }
  return targets.incompatible();
}

void verify_tensor_files(const TensorFiles& files) {
  TensorReader reader(files);
  for (const auto& [name, tensor] : files.tensors()) reader.add_to_verify(name);
  reader.verify(true);
}

Snapshot read_snapshot_folder(const TensorFiles& files) {
  Snapshot snapshot =
      files.manifest() ? files.manifest()->numbers : without_numbers();
  snapshot.model_state = read_weights(files);
  snapshot.digest = files.digest();
  const auto generators = files.names_under(kGeneratorPrefix);
  for (size_t rank = 0; rank < generators.size(); ++rank) {
    const std::string name = kGeneratorPrefix + std::to_string(rank);
    if (!files.tensors().contains(name)) {
      throw SnapshotError(files.path(),
                          "is damaged: it has no \"" + name + "\"");
    }
    snapshot.generator_states.push_back(read_tensor(files, name));
  }
  if (!files.manifest()) return snapshot;
  for (const auto& [name, item] : files.manifest()->items) {
    ItemState& state = snapshot.items[name];
    state.values = item.per_rank ? StateTree(item.values) : item.values.front();
    for (const std::string& key : files.names_under(name + ".")) {
      state.tensors.emplace_back(key, read_tensor(files, name + "." + key));
    }
    std::vector<std::string> order;
    for (size_t rank = 0; rank < item.tensors.size(); ++rank) {
      const std::string of =
          item.per_rank ? std::to_string(rank) + "." : std::string();
      for (const std::string& key : item.tensors[rank]) {
        order.push_back(of + key);
      }
    }
    order_tensors(state.tensors, order);
  }
  if (!files.manifest()->param_groups) return snapshot;
  OptimizerState& optimizer = snapshot.optimizer_state.emplace();
  optimizer.averager_step = files.manifest()->averager_step;
  int64_t number = 0;
  for (const NamedGroup& group : *files.manifest()->param_groups) {
    auto& numbered = optimizer.param_groups.emplace_back();
    numbered.options = group.options;
    numbered.param_names = group.params;
    for (const std::string& name : group.params) {
      const std::string prefix = kStatePrefix + name + ".";
      for (const std::string& key : keys_under(files, prefix)) {
        optimizer.state[number][key] = read_tensor(files, prefix + key);
      }
      numbered.params.push_back(number++);
    }
  }
  return snapshot;
}

}  // namespace lockstep::internal
