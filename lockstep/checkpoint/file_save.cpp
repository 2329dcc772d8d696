#include "lockstep/checkpoint/file_save.h"

#include <stdexcept>
#include <variant>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/generators.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_shards.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/rank_failure.h"
#include "lockstep/checkpoint/scheduler_state.h"
#include "lockstep/checkpoint/state_items.h"
#include "lockstep/checkpoint/utf8.h"
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

}  // namespace

void check_for_file(const std::string& path, const TrainingState& state,
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
  require_utf8(state.sampler_state, state.metadata);
  Snapshot snapshot{.model_state = state_dict(*state.model)};
  for (const auto& [name, item] : state.items) {
    ItemState& of_item = snapshot.items[name];
    if (item.module()) of_item.tensors = state_dict(*item.module());
  }
  check_snapshot_file(path, snapshot);
}

FileSave::FileSave(const std::string& path, const TrainingState& state,
                   const SnapshotOptions& options, const Ranks& ranks)
    : path_(path), writes_(ranks.rank() == 0) {
  snapshot_.generator_states = ranks.gather(generator_state());
  if (writes_) {
    try {
      collect(state, options, ranks.size());
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  agree(ranks);
}

void FileSave::agree(const Ranks& ranks) const {
  const auto failure = RankFailure::from_text(
      ranks.share(failure_ ? RankFailure(failure_).text() : "", 0));
  if (failure_) std::rethrow_exception(failure_);
  if (failure) failure->throw_for(path_, "was not written by rank 0: ");
}

void FileSave::collect(const TrainingState& state,
                       const SnapshotOptions& options, size_t ranks) {
  check_for_file(path_, state, options, ranks);
  snapshot_.model_state = state_dict(*state.model);
  for (const ModuleTensor& tensor : tensors_of(*state.model)) {
    if (!tensor.is_parameter) buffers_.insert(tensor.name);
  }
  if (state.optimizer) {
    snapshot_.optimizer_state = state_dict(*state.optimizer, *state.model);
  }
  if (state.scheduler) {
    set_scheduler_state(snapshot_, state.scheduler->state_dict());
  }
  snapshot_.items = items_for_file(state);
  snapshot_.epochs_run = state.epochs_run;
  snapshot_.step = state.step;
  snapshot_.sampler_state = state.sampler_state;
  snapshot_.metadata = state.metadata;
}

std::vector<TensorToWrite> FileSave::tensors() {
  std::vector<TensorToWrite> all;
  for (auto& [name, tensor] : snapshot_.model_state) {
    all.push_back({name, &tensor, buffers_.contains(name)});
  }
  for (auto& [item, saved] : snapshot_.items) {
    for (auto& [name, tensor] : saved.tensors) {
      all.push_back({item + "." + name, &tensor, /*is_buffer=*/true});
    }
  }
  if (!snapshot_.optimizer_state) return all;
  for (auto& [number, values] : snapshot_.optimizer_state->state) {
    for (auto& [key, value] : values) {
      if (auto* const tensor = std::get_if<at::Tensor>(&value)) {
        all.push_back({"optimizer." + std::to_string(number) + "." + key,
                       tensor,
                       /*is_buffer=*/false});
      }
    }
  }
  return all;
}

void FileSave::write() {
  if (!writes_ || failure_) return;
  try {
    save_snapshot_file(path_, snapshot_);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

std::string FileSave::commit(const Ranks& ranks) {
  // This also tells the other ranks that the file is written: no rank returns
  // before that.
  agree(ranks);
  return path_;
}

}  // namespace lockstep::internal
