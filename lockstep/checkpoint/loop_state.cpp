#include "lockstep/checkpoint/loop_state.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <stdexcept>
#include <string>

#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/state/digest.h"
#include "lockstep/state/optimizer_group.h"

namespace lockstep::internal {
namespace {

constexpr const char* kParamGroups = "param_groups";

}  // namespace

void require_optimizer(const TrainingState& state) {
  if (!state.scheduler || state.optimizer) return;
  throw std::invalid_argument(
      "TrainingState.scheduler is set, but TrainingState.optimizer is not; set "
      "both, because the learning rates are in the optimizer");
}

void set_scheduler_state(Snapshot& snapshot, StateTree state) {
  auto* dict = std::get_if<StateTree::Dict>(&state.value);
  const StateTree* found = dict ? dict->find(kParamGroups) : nullptr;
  const auto* groups = found ? found->as<StateTree::List>() : nullptr;
  if (groups) {
    auto& stored = snapshot.optimizer_state.value().param_groups;
    if (groups->size() != stored.size()) {
      throw std::invalid_argument(
          "TrainingState.scheduler is for an optimizer with " +
          std::to_string(groups->size()) +
          " parameter groups, TrainingState.optimizer has " +
          std::to_string(stored.size()) +
          "; give the optimizer that the scheduler was made for, or an "
          "unsharded one with the same groups");
    }
    StateTree::List others;  // which would be options that no optimizer has
    bool has_others = false;
    for (size_t g = 0; g < stored.size(); ++g) {
      StateTree::Dict other;
      const auto* values = (*groups)[g].as<StateTree::Dict>();
      for (size_t i = 0; values && i < values->items.size(); ++i) {
        const auto& [name, value] = values->items[i];
        const auto* number = value.as<double>();
        if (number && is_scheduler_value(name)) {
          stored[g].options.try_emplace(name, *number);
        } else {
          other.set(name, value);
          has_others = true;
        }
      }
      others.emplace_back(std::move(other));
    }
    dict->erase(kParamGroups);
    if (has_others) dict->set(kParamGroups, std::move(others));
  }
  snapshot.scheduler_state = std::move(state);
}

StateTree scheduler_state_of(const Snapshot& snapshot) {
  StateTree state = *snapshot.scheduler_state;
  auto* dict = std::get_if<StateTree::Dict>(&state.value);
  if (!dict || !snapshot.optimizer_state) return state;
  const StateTree* found = dict->find(kParamGroups);
  const auto* others = found ? found->as<StateTree::List>() : nullptr;
  StateTree::List groups;
  for (const auto& group : snapshot.optimizer_state->param_groups) {
    StateTree::Dict values;
    const size_t g = groups.size();
    const auto* other = others && g < others->size()
                            ? (*others)[g].as<StateTree::Dict>()
                            : nullptr;
    if (other) values = *other;
    for (const auto& [name, value] : group.options) {
      if (values.find(name) != nullptr) continue;  // a number of its own
      if (const auto* number = std::get_if<double>(&value)) {
        values.set(name, *number);
      } else if (const auto* integer = std::get_if<int64_t>(&value)) {
        values.set(name, static_cast<double>(*integer));
      }
    }
    groups.emplace_back(std::move(values));
  }
  dict->set(kParamGroups, std::move(groups));
  return state;
}

at::Tensor generator_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(const at::Tensor& state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

std::optional<at::Tensor> generator_state_for(
    const std::string& path, size_t saved,
    const std::function<at::Tensor(size_t)>& state_of, size_t rank,
    size_t size) {
  if (saved == 0) return std::nullopt;
  // The states are tried on a generator of our own, so that a wrong state is
  // refused before anything is changed.
  at::Generator trial = at::detail::createCPUGenerator(0);
  try {
    if (saved == size) {
      at::Tensor state = state_of(rank).contiguous();
      trial.set_state(state);
      return state;
    }
    const at::Tensor first = state_of(0).contiguous();
    Digest seed;
    seed.add(
        {static_cast<const char*>(first.const_data_ptr()), first.nbytes()});
    seed.add(uint64_t{rank});
    trial.set_current_seed(seed.value());
    return trial.get_state();
  } catch (const c10::Error&) {
    throw SnapshotError(path,
                        "holds a generator state that is not one of LibTorch's "
                        "CPU generator");
  }
}

}  // namespace lockstep::internal
