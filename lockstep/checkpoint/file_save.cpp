#include "lockstep/checkpoint/file_save.h"

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <variant>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/shard_file.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/checkpoint/state_items.h"
#include "lockstep/checkpoint/state_transfer.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/checkpoint/utf8.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {
namespace {

// Whether the tensor is the whole one, in its shape, and no other rank has
// tensors that this rank lacks.
bool has_whole_model(const at::Tensor& tensor, const TensorLayout& layout) {
  for (const ProcessGroupPtr& group : layout.groups) {
    if (group->size() > 1) return false;
  }
  return tensor.sizes() == at::IntArrayRef(layout.shape);
}

void require_whole(const torch::nn::Module& module) {
  for (const ModuleTensor& tensor : tensors_of(module)) {
    const TensorLayout* layout = layout_of(tensor.tensor);
    if (layout == nullptr || has_whole_model(tensor.tensor, *layout)) continue;
    throw std::invalid_argument(
        "the model's " + tensor.name +
        " is divided over ranks, and such a model is saved in a folder of "
        "snapshots, to which every rank writes its part: end the path with "
        "\"/\" (for a file of the weights alone: full_state_dict() and "
        "save_tensors())");
  }
}

// Throws if a file cannot hold such a training, whatever its tensors are.
void require_for_file(const TrainingState& state,
                      const SnapshotOptions& options, size_t ranks) {
  require_item_names(state);
  for (const auto& [name, item] : state.items) {
    if (dynamic_cast<OptimizerShards*>(item.optimizer()) != nullptr) {
      throw std::invalid_argument(
          "the item \"" + name +
          "\" is a sharded optimizer, which is saved in a folder of snapshots: "
          "end the path with \"/\"");
    }
    if (item.is_per_rank() && ranks > 1) {
      throw std::invalid_argument(
          "each rank has its own state of the item \"" + name +
          "\", which is saved in a folder of snapshots, to which every rank "
          "writes its part: end the path with \"/\"");
    }
    if (item.module()) require_whole(*item.module());
  }
  if (dynamic_cast<OptimizerShards*>(state.optimizer) != nullptr) {
    throw std::invalid_argument(
        "a sharded optimizer is saved in a folder of snapshots, to which every "
        "rank writes its part: end the path with \"/\" (for a file, collect "
        "the state: consolidate_state_dict() and plain())");
  }
  if (!state.model) {
    throw std::invalid_argument("TrainingState.model is not set");
  }
  require_whole(*state.model);
  if (options.keep_last != 0 || options.keep_every != 0) {
    throw std::invalid_argument(
        "SnapshotOptions::keep_last and keep_every are for folders of "
        "snapshots; end the path with \"/\", or leave them out");
  }
  require_optimizer(state);
}

std::string dtype_and_shape(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), tensor.sizes());
}

// Returns "model", "optimizer" or the item of a tensor.
std::string set_of(const std::string& name) {
  return name.substr(0, name.find('.'));
}

// Adds tensors for the state that the first step will make, which has its
// parameter's dtype.
void add_state_to_come(Snapshot& snapshot, const TrainingState& state) {
  if (!state.optimizer) return;
  int64_t number = 0;
  for (const auto& group : state.optimizer->param_groups()) {
    for (const at::Tensor& parameter : distinct(group.params())) {
      snapshot.optimizer_state->state[number++].try_emplace("state", parameter);
    }
  }
}

}  // namespace

void check_for_file(const std::string& path, const TrainingState& state,
                    const SnapshotOptions& options, size_t ranks) {
  require_for_file(state, options, ranks);
  Snapshot snapshot = snapshot_of_training(state, /*objects=*/true);
  add_state_to_come(snapshot, state);
  check_snapshot_file(path, snapshot);
}

nlohmann::json file_claims_of(const TrainingState& state) {
  if (!state.model) return {};
  require_item_names(state);
  nlohmann::json tensors = nlohmann::json::object();
  const auto add = [&](const torch::nn::Module& module,
                       const std::string& prefix) {
    for (const ModuleTensor& one : tensors_of(module)) {
      if (!one.is_parameter) continue;
      const std::string name = prefix + one.name;
      require_utf8(name);
      tensors[name] = dtype_and_shape(one.tensor);
    }
  };
  add(*state.model, kModelPrefix);
  for (const auto& [name, item] : state.items) {
    if (item.module()) add(*item.module(), name + ".");
  }
  return {{"kinds", kinds_of_items(state)},
          {"optimizer", state.optimizer != nullptr},
          {"scheduler", state.scheduler != nullptr},
          {"tensors", std::move(tensors)}};
}

void require_same_in_file(const std::vector<nlohmann::json>& claims) {
  std::vector<nlohmann::json> kinds;
  std::map<std::string, std::pair<std::string, size_t>> known;  // and the rank
  for (size_t rank = 0; rank < claims.size(); ++rank) {
    if (claims[rank].is_null()) {
      kinds.emplace_back();
      continue;
    }
    kinds.push_back(claims[rank].at("kinds"));
    for (const char* part : {"optimizer", "scheduler"}) {
      const bool lost = claims[rank].at(part).get<bool>() &&
                        !claims[0].is_null() && !claims[0].at(part).get<bool>();
      if (!lost) continue;
      throw std::invalid_argument(
          "rank " + std::to_string(rank) + " has TrainingState::" + part +
          ", and rank 0, which writes the file, has none; set it on rank 0");
    }
    for (const auto& [name, own] : claims[rank].at("tensors").items()) {
      const auto& [shape, first] =
          known.try_emplace(name, own.get<std::string>(), rank).first->second;
      if (shape == own) continue;
      throw std::invalid_argument("rank " + std::to_string(rank) +
                                  " has the tensor \"" + name + "\" as " +
                                  own.get<std::string>() + ", and rank " +
                                  std::to_string(first) + " as " + shape +
                                  "; all ranks must save the same model");
    }
  }
  require_same_items(kinds);
}

FileSave::FileSave(const std::string& path, const TrainingState& state,
                   const SnapshotOptions& options, const Ranks& ranks)
    : path_(path), writes_(ranks.rank() == 0), compares_(ranks.size() > 1) {
  const auto own = generator_state(state.model.get());
  // Ranks without the model, or with parts on other devices, have fewer states.
  auto padded = at::zeros(ranks.any({own.numel()}), own.options());
  padded.narrow(0, 0, own.numel()).copy_(own);
  const auto generators = ranks.gather(padded);
  const auto all = gather_or_fail(
      ranks,
      [&](nlohmann::json& mine) {
        // The other ranks' parts are only compared, and may be missing.
        if (writes_ || state.model) collect(state, options, ranks.size());
        mine["claims"] = file_claims_of(state);
      },
      failed_save(path_));
  snapshot_.generator_states = generators;
  std::vector<nlohmann::json> claims;
  for (const auto& rank : all) claims.push_back(rank.at("claims"));
  require_same_in_file(claims);
}

void FileSave::collect(const TrainingState& state,
                       const SnapshotOptions& options, size_t ranks) {
  require_for_file(state, options, ranks);
  snapshot_ = snapshot_of_training(state, /*objects=*/writes_);
  if (writes_) {
    check_snapshot_file(path_, snapshot_);
  } else {  // names are compared
    for (const auto& entry : all_tensors()) require_utf8(entry.name);
  }
  const auto add_buffers = [&](const torch::nn::Module& module,
                               const std::string& prefix) {
    for (const ModuleTensor& tensor : tensors_of(module)) {
      if (!tensor.is_parameter) buffers_.insert(prefix + tensor.name);
    }
  };
  const auto add_optimizer = [&](const torch::optim::Optimizer* optimizer,
                                 const std::string& set) {
    if (optimizer && has_state_of_each_rank(*optimizer)) {
      of_first_rank_.insert(set);
    }
  };
  add_buffers(*state.model, kModelPrefix);
  add_optimizer(state.optimizer, "optimizer");
  for (const auto& [name, item] : state.items) {
    add_optimizer(item.optimizer(), name);
    if (item.module()) add_buffers(*item.module(), name + ".");
    if (!item.is_object()) continue;
    if (!writes_) {
      // A MetricsLogger writes its rows, each rank's to a file of its own.
      (void)item.state_dict();
      continue;
    }
    for (const auto& [key, tensor] : snapshot_.items.at(name).tensors) {
      buffers_.insert(name + "." + key);  // the object may change it
    }
  }
}

// Names are those that the tensors have in a folder.
std::vector<TensorToWrite> FileSave::all_tensors() {
  std::vector<TensorToWrite> all;
  const auto add = [&](std::string name, at::Tensor& tensor) {
    const bool is_buffer = buffers_.contains(name);
    all.push_back({std::move(name), &tensor, is_buffer});
  };
  for (auto& [name, tensor] : snapshot_.model_state) {
    add(kModelPrefix + name, tensor);
  }
  for (auto& [item, saved] : snapshot_.items) {
    for (auto& [name, tensor] : saved.tensors) add(item + "." + name, tensor);
  }
  if (!snapshot_.optimizer_state) return all;
  auto& state = snapshot_.optimizer_state->state;
  for (const auto& group : snapshot_.optimizer_state->param_groups) {
    for (size_t i = 0; i < group.params.size(); ++i) {
      const auto found = state.find(group.params[i]);
      if (found == state.end()) continue;
      const std::string& name = group.param_names[i];
      const std::string prefix =
          kStatePrefix + (name.empty() ? std::to_string(found->first) : name) +
          ".";
      for (auto& [key, value] : found->second) {
        auto* const tensor = std::get_if<at::Tensor>(&value);
        if (tensor) add(prefix + key, *tensor);
      }
    }
  }
  return all;
}

std::vector<TensorToWrite> FileSave::replicas() {
  if (!compares_) return {};
  auto all = all_tensors();
  std::erase_if(all, [this](const TensorToWrite& entry) {
    return entry.is_buffer || entry.tensor->is_meta() ||
           of_first_rank_.contains(set_of(entry.name));
  });
  return all;
}

std::vector<TensorToWrite> FileSave::tensors() {
  return writes_ ? all_tensors() : std::vector<TensorToWrite>();
}

std::vector<TensorToCompare> FileSave::tensors_to_compare() {
  std::vector<TensorToCompare> all;
  if (writes_) return all;
  for (const TensorToWrite& entry : replicas()) {
    all.push_back({entry.name, *entry.tensor, &checksums_[entry.name]});
  }
  return all;
}

void FileSave::write() {
  if (failure_) return;
  try {
    FileForms forms;  // so that a tensor of a GPU is copied once
    for (const TensorToWrite& entry : replicas()) {
      if (writes_) *entry.tensor = forms.of(*entry.tensor);
      auto& checksums = checksums_[entry.name];
      if (checksums.empty()) checksums = block_checksums(*entry.tensor);
    }
    if (writes_) file_ = write_snapshot_file(path_, snapshot_);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

ReplicaChecksums FileSave::checksums_of_replicas() {
  ReplicaChecksums all;
  for (const TensorToWrite& entry : replicas()) {
    std::string& text = all[set_of(entry.name)][entry.name];
    text = dtype_and_shape(*entry.tensor);
    for (const uint64_t sum : checksums_.at(entry.name)) text += hex_of(sum);
  }
  return all;
}

std::string FileSave::commit(const Ranks& ranks) {
  ReplicaChecksums checksums;
  const auto all = gather_or_fail(
      ranks,
      [&](nlohmann::json& mine) {
        if (failure_) std::rethrow_exception(failure_);
        checksums = checksums_of_replicas();
        mine["replicas"] = digests_of(checksums);
      },
      failed_save(path_));
  std::vector<nlohmann::json> digests;
  for (const auto& rank : all) digests.push_back(rank.at("replicas"));
  require_equal_replicas(digests, checksums, ranks);
  // No rank returns before the file is written.
  return from_first_rank(
      ranks,
      [&] {
        file_->commit();
        return path_;
      },
      failed_save(path_));
}

}  // namespace lockstep::internal
