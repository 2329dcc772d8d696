#include "lockstep/checkpoint/loop_state.h"

#include <ATen/Context.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/state/digest.h"
#include "lockstep/state/optimizer_group.h"

namespace lockstep::internal {
namespace {

constexpr const char* kParamGroups = "param_groups";

using Generators = std::vector<at::Generator>;

// If not null, `model` must not be changed meanwhile.
Generators generators_of(const torch::nn::Module* model) {
  std::vector<at::Device> devices{at::kCPU};
  const auto add = [&](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !at::isAccelerator(tensor.device().type()) ||
          std::ranges::find(devices, tensor.device()) != devices.end()) {
        continue;
      }
      devices.push_back(tensor.device());
    }
  };
  if (model != nullptr) {
    add(model->parameters());
    add(model->buffers());
  }
  Generators generators;
  for (const at::Device& device : devices) {
    generators.push_back(at::globalContext().defaultGenerator(device));
  }
  return generators;
}

at::Tensor states_of(Generators generators) {
  std::vector<at::Tensor> states;
  for (at::Generator& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return at::cat(states);
}

void set_states(Generators generators, const at::Tensor& state) {
  int64_t begin = 0;
  for (at::Generator& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    const int64_t left = state.numel() - begin;
    if (begin > 0 && left == 0) return;
    const int64_t bytes = std::min(generator.get_state().numel(), left);
    generator.set_state(state.narrow(0, begin, bytes).clone());
    begin += bytes;
  }
}

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

at::Tensor generator_state(const torch::nn::Module* model) {
  return states_of(generators_of(model));
}

void set_generator_state(const at::Tensor& state,
                         const torch::nn::Module* model) {
  set_states(generators_of(model), state);
}

std::optional<at::Tensor> generator_state_for(
    const std::string& path, size_t saved,
    const std::function<at::Tensor(size_t)>& state_of, size_t rank, size_t size,
    const torch::nn::Module* model) {
  if (saved == 0) return std::nullopt;
  // The states are tried on generators of our own, so that a wrong state is
  // refused before anything is changed.
  Generators trials;
  for (const at::Generator& generator : generators_of(model)) {
    trials.push_back(generator.clone());
  }
  try {
    if (saved == size) {
      set_states(trials, state_of(rank).contiguous());
      return states_of(trials);
    }
    const at::Tensor first = state_of(0).contiguous();
    Digest seed;
    seed.add(
        {static_cast<const char*>(first.const_data_ptr()), first.nbytes()});
    seed.add(uint64_t{rank});
    for (at::Generator& trial : trials) trial.set_current_seed(seed.value());
    return states_of(trials);
  } catch (const c10::Error&) {
    throw SnapshotError(path,
                        "holds a generator state that is not one of LibTorch's "
                        "generators of the CPU and of the model's devices");
  }
}

}  // namespace lockstep::internal
