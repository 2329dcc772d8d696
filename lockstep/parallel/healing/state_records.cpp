#include "lockstep/parallel/healing/state_records.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <variant>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/state_transfer.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {
namespace {

PlaceRecord::Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()),
          tensor.nbytes()};
}

// Returns the checksum of the tensors of `snapshot`; of items, of those that
// `items` has.
uint64_t checksum_of_tensors(const Snapshot& snapshot,
                             const std::map<std::string, ItemState>& items) {
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : snapshot.model_state) {
    all["model." + name] = tensor;
  }
  if (snapshot.optimizer_state) {
    for (const auto& [number, values] : snapshot.optimizer_state->state) {
      for (const auto& [name, value] : values) {
        if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
          all["optimizer." + std::to_string(number) + "." + name] = *tensor;
        }
      }
    }
  }
  for (const auto& [item, state] : items) {
    for (const auto& [name, tensor] : snapshot.items.at(item).tensors) {
      all[item + "." + name] = tensor;
    }
  }
  Xxh3 sum;
  for (const auto& [name, tensor] : all) {
    sum.add(name.data(), name.size());
    const auto form = file_form(tensor);
    sum.add(form.const_data_ptr(), form.nbytes());
  }
  return sum.value();
}

}  // namespace

bool is_divided(const TrainingState& state) {
  const auto has_parts = [](const torch::nn::Module& module) {
    return std::ranges::any_of(tensors_of(module), [](const ModuleTensor& one) {
      return layout_of(one.tensor) != nullptr;
    });
  };
  const auto is_own = [](const torch::optim::Optimizer* optimizer) {
    return optimizer != nullptr &&
           (dynamic_cast<const OptimizerShards*>(optimizer) != nullptr ||
            has_state_of_each_rank(*optimizer));
  };
  if (has_parts(*state.model) || is_own(state.optimizer)) return true;
  return std::ranges::any_of(state.items, [&](const auto& one) {
    const StateItem& item = one.second;
    return item.is_per_rank() || is_own(item.optimizer()) ||
           (item.module() && has_parts(*item.module()));
  });
}

StateRecords::StateRecords(const FileDescriptor& memory, size_t first,
                           TrainingState& state)
    : state_(state), record_(memory, first, kSlots) {}

Snapshot without_samplers(const TrainingState& state) {
  Snapshot snapshot = snapshot_of_training(state, /*objects=*/true);
  for (const auto& [name, item] : state.items) {
    if (item.is_sampler()) snapshot.items.erase(name);
  }
  return snapshot;
}

void StateRecords::write(int64_t steps) {
  Snapshot snapshot = without_samplers(state_);
  snapshot.generator_states = {generator_state(state_.model.get())};
  const PackedSnapshot packed = pack(snapshot);
  const uint64_t text_bytes = packed.text.size();
  std::vector<PlaceRecord::Bytes> parts = {
      std::as_bytes(std::span(&text_bytes, 1)),
      std::as_bytes(std::span(packed.text))};
  for (const auto& tensor : packed.tensors) parts.push_back(bytes_of(tensor));
  record_.write(steps, parts);
}

Snapshot StateRecords::load(int64_t steps) {
  const auto record = record_.read(steps);
  if (!record) {
    throw std::runtime_error(
        "HealedTraining: this rank has no copy of its "
        "state after step " +
        std::to_string(steps));
  }
  const std::byte* from = record->data();
  const auto take = [&](void* to, size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(to, from, bytes);
    from += bytes;
  };
  uint64_t text_bytes = 0;
  take(&text_bytes, sizeof text_bytes);
  std::string text(text_bytes, '\0');
  take(text.data(), text.size());
  Snapshot snapshot = unpack(text, [&](at::Tensor& tensor) {
    take(tensor.mutable_data_ptr(), tensor.nbytes());
  });
  TrainingLoad load(snapshot, state_, /*own=*/true);
  load.apply();
  load.apply_items();
  set_generator_state(snapshot.generator_states.at(0), state_.model.get());
  state_.metadata = snapshot.metadata;
  record_.forget_after(steps);
  const Snapshot now = snapshot_of_training(state_, /*objects=*/false);
  if (checksum_of_tensors(now, now.items) !=
      checksum_of_tensors(snapshot, now.items)) {
    throw std::runtime_error(
        "HealedTraining: this rank did not get the state that was copied after "
        "step " +
        std::to_string(steps));
  }
  return snapshot;
}

}  // namespace lockstep::internal
