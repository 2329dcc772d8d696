#include "lockstep/checkpoint/state_transfer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/base/huge_pages.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/safetensors/safetensors_format.h"
#include "lockstep/checkpoint/state_items.h"
#include "lockstep/comm/point_to_point.h"

namespace lockstep::internal {
namespace {

at::Tensor bytes_of(std::string& text) {
  return at::from_blob(text.data(), {static_cast<int64_t>(text.size())},
                       at::kByte);
}

// Returns the optimizer's state by the parameters' numbers: of a sharded one,
// that of this rank's part of each parameter.
OptimizerState own_state_of(torch::optim::Optimizer& optimizer,
                            const torch::nn::Module& model) {
  auto* sharded = dynamic_cast<OptimizerShards*>(&optimizer);
  if (sharded == nullptr) return state_dict(optimizer, model);
  OptimizerShards::State own = sharded->shards();
  OptimizerState state = std::move(own.groups);
  for (auto& [part, values] : own.local.state) {
    state.state[own.parts[static_cast<size_t>(part)].parameter] =
        std::move(values);
  }
  return state;
}

std::unique_ptr<PreparedOptimizer> prepare_own_optimizer(
    const Snapshot& snapshot, const ModuleLoad& load,
    const TrainingState& state, bool own) {
  auto* sharded = dynamic_cast<OptimizerShards*>(state.optimizer);
  if (sharded != nullptr && own) {
    return prepare_shards(*sharded, *snapshot.optimizer_state);
  }
  return std::make_unique<OptimizerLoad>(
      *state.optimizer,
      ordered_state(snapshot, load, *state.optimizer, *state.model),
      /*adopt=*/own);
}

}  // namespace

Snapshot snapshot_of_training(const TrainingState& state, bool objects) {
  Snapshot snapshot{.model_state = state_dict(*state.model)};
  if (state.optimizer) {
    snapshot.optimizer_state = own_state_of(*state.optimizer, *state.model);
  }
  snapshot.items = items_for_file(state, objects);
  if (!objects) return snapshot;
  if (state.scheduler) {
    set_scheduler_state(snapshot, state.scheduler->state_dict());
  }
  snapshot.epochs_run = state.epochs_run;
  snapshot.step = state.step;
  snapshot.sampler_state = state.sampler_state;
  snapshot.metadata = state.metadata;
  return snapshot;
}

TrainingLoad::TrainingLoad(const Snapshot& snapshot, const TrainingState& state,
                           bool own)
    : model_(state.model), model_state_(snapshot.model_state) {
  NamedTensors model = snapshot.model_state;
  for (const std::string& name : snapshot.not_tensors) {
    model.emplace_back(name, at::Tensor());
  }
  const auto load = check_state_dict(*state.model, model);
  if (!own) require_whole_tensors(load, *state.model);
  if (state.optimizer && snapshot.optimizer_state) {
    optimizer_ = prepare_own_optimizer(snapshot, load, state, own);
  }
  if (state.scheduler && !snapshot.scheduler_unreadable.empty()) {
    throw std::invalid_argument(
        "the snapshot's scheduler state is not read: " +
        snapshot.scheduler_unreadable +
        "; start without TrainingState.scheduler, or save the snapshot "
        "without it");
  }
  if (state.scheduler && snapshot.scheduler_state) {
    scheduler_ = state.scheduler->prepare_load(scheduler_state_of(snapshot));
  }
  for (const auto& [name, item] : state.items) {
    const auto saved = snapshot.items.find(name);
    if (saved == snapshot.items.end()) continue;
    items_.push_back(prepare_item(state, name, item, saved->second));
  }
}

void TrainingLoad::apply() {
  load_state_dict(*model_, model_state_);
  if (optimizer_) optimizer_->apply();
  if (scheduler_) scheduler_();
}

void TrainingLoad::apply_items() {
  for (const auto& load : items_) load();
}

PackedSnapshot pack(const Snapshot& snapshot) {
  auto tree = safetensors_tree_of(snapshot);
  PackedSnapshot packed;
  nlohmann::json tensors = nlohmann::json::array();
  for (auto& [name, tensor] : tree.tensors) {
    tensors.push_back(
        {name, safetensors_dtype(tensor.scalar_type()), tensor.sizes().vec()});
    packed.tensors.push_back(std::move(tensor));
  }
  packed.text = nlohmann::json({{"tensors", std::move(tensors)},
                                {"aliases", tree.aliases},
                                {"description", tree.description}})
                    .dump();
  return packed;
}

Snapshot unpack(const std::string& text,
                const std::function<void(at::Tensor& tensor)>& fill) {
  const auto json = nlohmann::json::parse(text);
  SafetensorsTree tree;
  for (const auto& one : json.at("tensors")) {
    auto tensor = at::empty(
        one.at(2).get<std::vector<int64_t>>(),
        dtype_of_safetensors(one.at(1).get_ref<const std::string&>()));
    fill(tensor);
    tree.tensors.emplace_back(one.at(0).get<std::string>(), std::move(tensor));
  }
  json.at("aliases").get_to(tree.aliases);
  json.at("description").get_to(tree.description);
  return snapshot_of(tree);
}

void send_snapshot(const Snapshot& snapshot, int to) {
  auto packed = pack(snapshot);
  auto size = at::empty({1}, at::kLong);
  size.fill_(static_cast<int64_t>(packed.text.size()));
  send(size, to);
  send(bytes_of(packed.text), to);
  for (const auto& tensor : packed.tensors) send(tensor, to);
}

Snapshot receive_snapshot(int from) {
  auto size = at::empty({1}, at::kLong);
  recv(size, from);
  std::string text(static_cast<size_t>(size.item<int64_t>()), '\0');
  auto bytes = bytes_of(text);
  recv(bytes, from);
  return unpack(text, [from](at::Tensor& tensor) {
    prefer_huge_pages(tensor.data_ptr(), tensor.nbytes());
    recv(tensor, from);
  });
}

}  // namespace lockstep::internal
