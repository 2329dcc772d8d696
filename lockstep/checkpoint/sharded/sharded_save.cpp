#include "lockstep/checkpoint/sharded/sharded_save.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/state_shards.h"
#include "lockstep/checkpoint/sharded/tensor_files.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/checkpoint/state_items.h"
#include "lockstep/checkpoint/utf8.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

// Returns what this rank tells the others of its optimizer: hyperparameters and
// parameters of each group, the model's parameters that are in none, and step
// counts, if the optimizer is one that is not sharded.
Json optimizer_claims_of(const OptimizerShards::State& state,
                         const std::vector<NamedGroup>& groups,
                         const torch::nn::Module& model,
                         const std::string& prefix,
                         const std::vector<TensorShard>& shards,
                         bool is_sharded) {
  Json claims{{"groups", Json::array()},
              {"without", Json::array()},
              {"steps", Json::object()}};
  for (const NamedGroup& group : groups) {
    NamedTensors tensors;
    claims["groups"].push_back(
        {{"options", split_tensors(group.options, "", tensors).dump()},
         {"params", group.params}});
  }
  std::set<const c10::TensorImpl*> stepped;
  for (const at::Tensor& parameter : state.parameters) {
    stepped.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& [parameter, name] : parameter_names(model)) {
    if (!stepped.contains(parameter)) claims["without"].push_back(name);
  }
  for (const TensorShard& shard : shards) {
    // The shard of a parameter without dimensions has one, of 0 or 1 elements,
    // and such parameters have momenta without dimensions.
    if (is_sharded || !shard.shape.empty() || shard.tensor.dim() != 0 ||
        !shard.name.starts_with(prefix) || !shard.name.ends_with(".step")) {
      continue;
    }
    claims["steps"][shard.name] = shard.tensor.item<double>();
  }
  return claims;
}

// Throws unless these optimizers can be saved together. Their ranks may have
// different parameters: those of the stages of a pipeline.
void require_same_optimizers(const std::vector<Json>& all) {
  std::map<std::string, double> steps;
  std::map<std::string, std::pair<size_t, size_t>> groups;  // and the rank
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Json& mine = all[rank];
    if (mine.is_null() != all[0].is_null()) {
      throw std::invalid_argument(
          "rank " + std::to_string(rank) +
          (mine.is_null() ? " has no optimizer, and rank 0 has one"
                          : " has an optimizer, and rank 0 has none") +
          "; set TrainingState::optimizer on all ranks or on none");
    }
    if (mine.is_null()) continue;
    const size_t own_count = mine.at("groups").size();
    const size_t first_count = all[0].at("groups").size();
    if (own_count != first_count) {
      throw std::invalid_argument(
          "the optimizer of rank " + std::to_string(rank) + " has " +
          std::to_string(own_count) +
          " parameter groups, and that of rank 0 has " +
          std::to_string(first_count) +
          "; ranks that save together need the same groups");
    }
    bool same = true;
    for (size_t g = 0; g < own_count; ++g) {
      const Json& group = mine.at("groups")[g];
      same =
          same && group.at("options") == all[0].at("groups")[g].at("options");
      for (const auto& name : group.at("params")) {
        const auto [known, is_new] =
            groups.try_emplace(name.get<std::string>(), g, rank);
        same = same && known->second.first == g;
      }
    }
    if (same) {
      for (const auto& [name, count] : mine.at("steps").items()) {
        const auto known = steps.try_emplace(name, count.get<double>()).first;
        same = same && known->second == count.get<double>();
      }
    }
    if (same) continue;
    throw std::invalid_argument(
        "the optimizer of rank " + std::to_string(rank) +
        " has other hyperparameters or step counts than that of rank 0; "
        "ranks that save together must have stepped alike (after uneven "
        "inputs, a JoinedOptimizer makes them equal)");
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].is_null()) continue;
    for (const auto& name : all[rank].at("without")) {
      const auto known = groups.find(name.get<std::string>());
      if (known == groups.end()) continue;
      throw std::invalid_argument(
          "the optimizer of rank " + std::to_string(rank) +
          " does not have the parameter " + known->first +
          " of its model, but that of rank " +
          std::to_string(known->second.second) +
          " has it; ranks that save together must optimize the same "
          "parameters");
    }
  }
}

// Leaves of optimizer_claims_of() the names of hyperparameters, and the
// parameters.
void keep_structure(Json& claims) {
  if (claims.is_null()) return;
  claims["steps"] = Json::object();
  for (Json& group : claims["groups"]) {
    Json options =
        Json::parse(group.at("options").get_ref<const std::string&>());
    for (Json& value : options) value = nullptr;
    group["options"] = options.dump();
  }
}

// Returns the member `name` of what each rank tells.
std::vector<Json> told(const std::vector<Json>& all, const char* name) {
  std::vector<Json> members;
  for (const Json& rank : all) members.push_back(rank.at(name));
  return members;
}

// Throws unless what the ranks tell makes one snapshot.
SavePlan plan_of_ranks(const std::vector<Json>& all) {
  const std::vector<Json> kinds = told(all, "kinds");
  require_same_items(kinds);
  for (const auto& [name, kind] : kinds.front().items()) {
    if (kind != kOptimizerKind) continue;
    std::vector<Json> optimizers;
    for (const Json& rank : all) {
      optimizers.push_back(rank.at("items").at(name));
    }
    require_same_optimizers(optimizers);
  }
  require_names_differ(told(all, "stages"));
  require_same_optimizers(told(all, "optimizer"));
  return plan_save(told(all, "claims"));
}

// Adds the parameters of the ranks' groups that are missing, in rank order.
void add_params(const std::vector<Json>& all, std::vector<NamedGroup>& groups) {
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<std::string> params;
    std::set<std::string> known;
    for (const Json& rank : all) {
      for (const auto& name : rank.at("groups")[g].at("params")) {
        if (known.insert(name).second) params.push_back(name);
      }
    }
    groups[g].params = std::move(params);
  }
}

// Throws if a folder cannot hold such a training, whatever its tensors are.
void require_for_folder(const TrainingState& state,
                        const SnapshotOptions& options) {
  if (!state.model) {
    throw std::invalid_argument("TrainingState.model is not set");
  }
  if (state.step < 0) {
    throw std::invalid_argument("TrainingState.step is " +
                                std::to_string(state.step) +
                                "; a folder of snapshots needs 0 or more");
  }
  if (options.keep_last < 0 || options.keep_every < 0) {
    throw std::invalid_argument(
        "SnapshotOptions::keep_last and keep_every must be 0 or more");
  }
  if (options.keep_every > 0 && options.keep_last == 0) {
    throw std::invalid_argument(
        "SnapshotOptions::keep_every is set, but without keep_last all "
        "snapshots stay; set keep_last, too");
  }
  require_optimizer(state);
  require_utf8(state.sampler_state, state.metadata);
  require_item_names(state);
}

}  // namespace

Json claims_before_training(const TrainingState& state,
                            const SnapshotOptions& options) {
  require_for_folder(state, options);
  SaveFiles files;
  Json mine;
  ShardedSave(options, files).collect(state, known_state_of, mine);
  // Hyperparameters and step counts may differ now: a load or the training may
  // make them equal before the first save.
  keep_structure(mine["optimizer"]);
  for (const auto& [name, kind] : mine.at("kinds").items()) {
    if (kind == kOptimizerKind) keep_structure(mine["items"][name]);
  }
  std::vector<TensorShard> shards;
  add_model(*state.model, kModelPrefix, shards);
  for (const auto& [name, item] : state.items) {
    if (item.module()) add_model(*item.module(), name + ".", shards);
  }
  mine["claims"] = claims_of(shards);
  mine["stages"] = stages_of(*state.model, /*buffers=*/false);
  return mine;
}

void require_same_training(const std::vector<Json>& claims) {
  (void)plan_of_ranks(claims);
}

ShardedSave::ShardedSave(const SnapshotOptions& options, SaveFiles& files)
    : options_(options), rank_(0), ranks_(1), files_(files) {}

ShardedSave::ShardedSave(const std::string& folder, const TrainingState& state,
                         const SnapshotOptions& options, const Ranks& ranks,
                         SaveFiles& files)
    : folder_(folder_of_path(folder)),
      options_(options),
      rank_(ranks.rank()),
      ranks_(ranks.size()),
      files_(files) {
  const auto all = gather_or_fail(
      ranks, [&](Json& mine) { collect(state, optimizer_state_of, mine); },
      failed_save(folder_));
  make_plan(all);
  begin_folder(ranks);
}

ShardedSave::~ShardedSave() = default;

std::vector<TensorToWrite> ShardedSave::tensors() {
  std::vector<TensorToWrite> all;
  for (auto& file : entries_) {
    for (PlannedEntry& entry : file) {
      all.push_back(
          {entry.name, &entry.elements, buffers_.contains(entry.name)});
    }
  }
  return all;
}

std::vector<TensorToCompare> ShardedSave::tensors_to_compare() {
  std::vector<TensorToCompare> all;
  for (Replica& replica : replicas_) {
    all.push_back(
        {replica.entry.name, replica.entry.elements, &replica.checksums});
  }
  return all;
}

void ShardedSave::collect(
    const TrainingState& state,
    OptimizerShards::State (*state_of)(torch::optim::Optimizer&), Json& mine) {
  OptimizerStates optimizers;
  const auto add = [&](const std::string& name,
                       torch::optim::Optimizer* optimizer) {
    if (optimizer) optimizers.emplace(name, state_of(*optimizer));
  };
  // These come first, because they may be collective.
  add("", state.optimizer);
  for (const auto& [name, item] : state.items) add(name, item.optimizer());
  require_for_folder(state, options_);
  add_model(*state.model, kModelPrefix, shards_);
  for (const ModuleTensor& tensor : tensors_of(*state.model)) {
    if (!tensor.is_parameter) buffers_.insert(kModelPrefix + tensor.name);
  }
  Json claims_of_optimizer;
  if (state.optimizer) {
    const OptimizerShards::State& optimizer = optimizers.at("");
    add_optimizer(optimizer, *state.model, kStatePrefix, shards_);
    manifest_.param_groups = named_groups(optimizer, *state.model);
    manifest_.averager_step = optimizer.groups.averager_step;
    const bool is_sharded =
        dynamic_cast<OptimizerShards*>(state.optimizer) != nullptr;
    claims_of_optimizer =
        optimizer_claims_of(optimizer, *manifest_.param_groups, *state.model,
                            kStatePrefix, shards_, is_sharded);
    if (state.scheduler) add_scheduler(*state.scheduler);
  }
  Json items_of_ranks = Json::object();
  add_items(state, optimizers, items_of_ranks);
  const at::Tensor generator = generator_state(state.model.get());
  shards_.push_back({kGeneratorPrefix + std::to_string(rank_),
                     generator.sizes().vec(), Replicate{}, generator});
  for (const TensorShard& shard : shards_) require_utf8(shard.name);
  manifest_.world_size = static_cast<int64_t>(ranks_);
  manifest_.numbers.epochs_run = state.epochs_run;
  manifest_.numbers.step = state.step;
  manifest_.numbers.sampler_state = state.sampler_state;
  manifest_.numbers.metadata = state.metadata;
  mine = {{"optimizer", std::move(claims_of_optimizer)},
          {"tied", tied_names(*state.model)},
          {"stages", stages_of(*state.model, /*buffers=*/true)},
          {"kinds", kinds_of_items(state)},
          {"items", std::move(items_of_ranks)},
          {"claims", claims_of(shards_)}};
}

void ShardedSave::add_items(const TrainingState& state,
                            const OptimizerStates& optimizers, Json& of_ranks) {
  for (const auto& [name, item] : state.items) {
    Manifest::Item& stored = manifest_.items[name];
    const std::string prefix = name + ".";
    if (item.module()) {
      add_model(*item.module(), prefix, shards_);
      for (const ModuleTensor& tensor : tensors_of(*item.module())) {
        if (!tensor.is_parameter) buffers_.insert(prefix + tensor.name);
      }
      stored.values.emplace_back();
      continue;
    }
    if (item.optimizer()) {
      const OptimizerShards::State& own = optimizers.at(name);
      const auto& module = module_of_optimizer(state, name, own);
      const std::string state_prefix = prefix + kItemStateInfix;
      add_optimizer(own, module, state_prefix, shards_);
      const auto groups = named_groups(own, module);
      stored.values.push_back(
          values_of_groups(groups, own.groups.averager_step));
      const bool is_sharded =
          dynamic_cast<OptimizerShards*>(item.optimizer()) != nullptr;
      of_ranks[name] = optimizer_claims_of(own, groups, module, state_prefix,
                                           shards_, is_sharded);
      continue;
    }
    ItemState saved = item.state_dict();
    require_utf8(saved.values);
    const Json values =
        item_json(name, saved.values);  // throws here, not later
    stored.per_rank = item.is_per_rank();
    std::vector<std::string> keys;
    for (const auto& [key, tensor] : saved.tensors) keys.push_back(key);
    if (stored.per_rank) {
      of_ranks[name] = {{"values", values}, {"tensors", std::move(keys)}};
    } else {
      stored.values.push_back(std::move(saved.values));
      stored.tensors.push_back(std::move(keys));
    }
    const std::string own_prefix =
        stored.per_rank ? prefix + std::to_string(rank_) + "." : prefix;
    for (auto& [key, tensor] : saved.tensors) {
      // The object may change it at any time.
      buffers_.insert(own_prefix + key);
      shards_.push_back({.name = own_prefix + key,
                         .shape = tensor.sizes().vec(),
                         .placement = Replicate{},
                         .tensor = tensor.detach(),
                         .of_first_rank = true});
    }
  }
}

// Its numbers for each group go to the options of the optimizer's groups.
void ShardedSave::add_scheduler(const ResumableScheduler& scheduler) {
  Snapshot with_groups;
  auto& groups = with_groups.optimizer_state.emplace().param_groups;
  for (const NamedGroup& group : *manifest_.param_groups) {
    groups.push_back({.options = group.options, .params = {}});
  }
  set_scheduler_state(with_groups, scheduler.state_dict());
  for (size_t g = 0; g < groups.size(); ++g) {
    (*manifest_.param_groups)[g].options = std::move(groups[g].options);
  }
  require_utf8(*with_groups.scheduler_state);
  (void)scheduler_json(*with_groups.scheduler_state);  // throws here, not later
  manifest_.numbers.scheduler_state = std::move(with_groups.scheduler_state);
}

void ShardedSave::make_plan(const std::vector<Json>& all) {
  for (const Json& rank : all) {
    for (const auto& [name, first] : rank.at("tied").items()) {
      manifest_.tied.try_emplace(name, first.get<std::string>());
    }
  }
  plan_ = plan_of_ranks(all);
  for (auto& [name, item] : manifest_.items) add_ranks_of_item(all, name, item);
  if (manifest_.param_groups) {
    add_params(told(all, "optimizer"), *manifest_.param_groups);
  }
  manifest_.tensors = plan_.tensors;
  entries_ = entries_of(plan_, rank_, shards_);
  for (PlannedEntry& entry : replicas_of(plan_, rank_, shards_)) {
    replicas_.push_back({std::move(entry), {}});
  }
}

// Adds what the ranks have of an item that differs between them.
void ShardedSave::add_ranks_of_item(const std::vector<Json>& all,
                                    const std::string& name,
                                    Manifest::Item& item) const {
  std::vector<Json> values;
  for (const Json& rank : all) {
    const auto found = rank.at("items").find(name);
    if (found != rank.at("items").end()) values.push_back(*found);
  }
  if (item.per_rank) {
    for (const Json& one : values) {
      item.values.push_back(item_values_of(one.at("values")));
      item.tensors.push_back(one.at("tensors").get<std::vector<std::string>>());
    }
  } else if (!values.empty()) {
    auto groups = groups_of_values(item.values.front());
    add_params(values, groups);
    item.values.front() =
        values_of_groups(groups, averager_step_of(item.values.front()));
  }
}

void ShardedSave::begin_folder(const Ranks& ranks) {
  aside_ = from_first_rank(
      ranks,
      [&] {
        being_saved_ = std::make_unique<SnapshotBeingSaved>(files_, folder_);
        return being_saved_->path();
      },
      failed_save(folder_));
}

void ShardedSave::write() {
  if (failure_) return;
  try {
    std::error_code error;
    if (!std::filesystem::is_directory(aside_, error)) {
      throw SnapshotError(
          folder_, "is not the same folder here as on rank 0",
          "name a folder on a file system that all ranks share, or a file "
          "(\"snapshot.pt\"), which rank 0 writes alone");
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
      Json placements = Json::object();
      for (const PlannedEntry& entry : entries_[i]) {
        placements[entry.name] = plan_.tensors.at(entry.name).placement;
      }
      const Json shard{{"format", kFolderFormat},
                       {"lockstep_version", lockstep_version()},
                       {"torch_version", torch_version()},
                       {"rank", rank_},
                       {"world_size", ranks_},
                       {"step", manifest_.numbers.step},
                       {"placements", std::move(placements)}};
      written_.push_back(write_shard_file(
          files_, aside_, shard_file_name(rank_, i, entries_.size()),
          std::move(entries_[i]), {{kShardKey, shard.dump()}},
          &checksums_.emplace_back()));
    }
    for (Replica& replica : replicas_) {
      if (!replica.checksums.empty()) continue;
      replica.checksums = block_checksums(replica.entry.elements);
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
}

std::string ShardedSave::commit(const Ranks& ranks) {
  ReplicaChecksums checksums;
  const auto all = gather_or_fail(
      ranks,
      [&](Json& mine) {
        if (failure_) std::rethrow_exception(failure_);
        checksums = checksums_of_replicas();
        mine["files"] = Json::array();
        for (const WrittenFile& file : written_) {
          mine["files"].push_back(
              {file.name, file.bytes, file.header_checksum});
        }
        mine["replicas"] = digests_of(checksums);
      },
      failed_save(folder_));
  std::vector<Json> digests;
  for (const Json& rank : all) digests.push_back(rank.at("replicas"));
  require_equal_replicas(digests, checksums, ranks);
  return from_first_rank(
      ranks, [&] { return finish(all); }, failed_save(folder_));
}

ReplicaChecksums ShardedSave::checksums_of_replicas() const {
  ReplicaChecksums checksums;
  auto replica = replicas_.begin();
  for (const SavePlan::Part& part : plan_.parts) {
    const auto& holders = plan_.holders[part.held_by];
    if (holders.size() == 1 || part.box.numel() == 0 ||
        !std::binary_search(holders.begin(), holders.end(), rank_)) {
      continue;
    }
    std::string& text = checksums[std::to_string(part.held_by)][part.name];
    if (part.rank == rank_) {
      text += checksums_[part.file].at(part.name);
    } else {
      for (const uint64_t sum : replica->checksums) text += hex_of(sum);
      ++replica;
    }
  }
  return checksums;
}

std::string ShardedSave::finish(const std::vector<Json>& written) {
  for (const Json& rank : written) {
    for (const Json& file : rank.at("files")) {
      manifest_.files.push_back({file.at(0).get<std::string>(),
                                 file.at(1).get<uint64_t>(),
                                 file.at(2).get<uint64_t>()});
    }
  }
  manifest_.parts = parts_of(plan_);
  const std::string text = text_of(manifest_);
  if (text.size() > kMostTextBytes) {
    throw std::invalid_argument(
        "the text of the snapshot has " + std::to_string(text.size()) +
        " bytes, and 256 MiB can be read; let the items' state_dict() return "
        "long lists of numbers as tensors");
  }
  const std::string name = aside_ + "/" + kManifestName;
  const FileDescriptor file = files_.create(name);
  files_.write_at(file, name, 0, text.data(), text.size());
  files_.sync(file, name);
  // Another host may have taken them for left over, if it does not see the
  // lock.
  for (const WrittenFile& one : manifest_.files) {
    std::error_code error;
    const auto bytes =
        std::filesystem::file_size(aside_ + "/" + one.name, error);
    if (!error && bytes == one.bytes) continue;
    throw SnapshotError(folder_, "lost the file " + one.name +
                                     " of the snapshot that was being saved");
  }
  const std::string path = being_saved_->commit(manifest_.numbers.step);
  try {
    link_latest(files_, path);
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(),
                            "the snapshot \"" + path +
                                "\" was saved, but the link to it was not set");
  }
  remove_old_snapshots(files_, folder_, options_.keep_last,
                       options_.keep_every);
  return path;
}

}  // namespace lockstep::internal
