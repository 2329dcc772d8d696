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

}  // namespace

Snapshot snapshot_of_training(const TrainingState& state, bool objects) {
  Snapshot snapshot{.model_state = state_dict(*state.model)};
  if (state.optimizer) {
    snapshot.optimizer_state = state_dict(*state.optimizer, *state.model);
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
                           bool adopt)
    : model_(state.model), model_state_(snapshot.model_state) {
  NamedTensors model = snapshot.model_state;
  for (const std::string& name : snapshot.not_tensors) {
    model.emplace_back(name, at::Tensor());
  }
  const auto load = check_state_dict(*state.model, model);
  if (state.optimizer && snapshot.optimizer_state) {
    optimizer_ = std::make_unique<OptimizerLoad>(
        *state.optimizer,
        ordered_state(snapshot, load, *state.optimizer, *state.model), adopt);
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

void send_snapshot(const Snapshot& snapshot, int to) {
  const auto tree = safetensors_tree_of(snapshot);
  nlohmann::json tensors = nlohmann::json::array();
  for (const auto& [name, tensor] : tree.tensors) {
    tensors.push_back(
        {name, safetensors_dtype(tensor.scalar_type()), tensor.sizes().vec()});
  }
  std::string text = nlohmann::json({{"tensors", std::move(tensors)},
                                     {"aliases", tree.aliases},
                                     {"description", tree.description}})
                         .dump();
  auto size = at::empty({1}, at::kLong);
  size.fill_(static_cast<int64_t>(text.size()));
  send(size, to);
  send(bytes_of(text), to);
  for (const auto& [name, tensor] : tree.tensors) send(tensor, to);
}

Snapshot receive_snapshot(int from) {
  auto size = at::empty({1}, at::kLong);
  recv(size, from);
  std::string text(static_cast<size_t>(size.item<int64_t>()), '\0');
  auto bytes = bytes_of(text);
  recv(bytes, from);
  const auto json = nlohmann::json::parse(text);
  SafetensorsTree tree;
  for (const auto& one : json.at("tensors")) {
    auto tensor = at::empty(
        one.at(2).get<std::vector<int64_t>>(),
        dtype_of_safetensors(one.at(1).get_ref<const std::string&>()));
    prefer_huge_pages(tensor.data_ptr(), tensor.nbytes());
    recv(tensor, from);
    tree.tensors.emplace_back(one.at(0).get<std::string>(), std::move(tensor));
  }
  json.at("aliases").get_to(tree.aliases);
  json.at("description").get_to(tree.description);
  return snapshot_of(tree);
}

}  // namespace lockstep::internal
