#include "lockstep/checkpoint/generators.h"

#include <ATen/Context.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {
namespace {

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
