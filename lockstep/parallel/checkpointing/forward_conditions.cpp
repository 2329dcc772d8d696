#include "lockstep/parallel/checkpointing/forward_conditions.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/version_of.h"
#include "lockstep/parallel/checkpointing/checkpoint_options.h"
#include "lockstep/parallel/data_parallel/replica_threads.h"
#include "lockstep/parallel/fsdp/unit_hooks.h"

namespace lockstep::internal {
namespace {

using GeneratorStates = std::vector<std::pair<at::Generator, at::Tensor>>;

void add_generator(GeneratorStates& states, at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto state = generator.get_state();
  states.emplace_back(std::move(generator), std::move(state));
}

void restore_generators(const GeneratorStates& states) {
  for (auto [generator, state] : states) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace

ForwardConditions::AutocastState::AutocastState(c10::DeviceType of)
    : device(of),
      enabled(at::autocast::is_autocast_enabled(of)),
      dtype(at::autocast::get_autocast_dtype(of)) {}

ForwardConditions::ForwardConditions(const std::vector<at::Tensor>& inputs,
                                     bool generators)
    : cpu_(at::kCPU),
      cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  const auto accelerator = visible_accelerator();
  if (accelerator && at::autocast::is_autocast_available(*accelerator)) {
    accelerator_.emplace(*accelerator);
  }
  if (!generators) return;
  // Between here and what the forward draws, other replicas may draw.
  if (runs_beside_replicas()) {
    throw std::invalid_argument(
        "checkpoint: several CPU replicas of a DataParallel draw from one "
        "generator, so a recomputation cannot draw what its forward drew; set "
        "preserve_rng_state to false if nothing in the function is random, or "
        "train with DistributedDataParallel");
  }
  std::vector<at::Device> devices{at::kCPU};
  for (const auto& input : inputs) {
    if (!input.defined()) continue;
    const auto device = input.device();
    if (!at::isAccelerator(device.type())) continue;
    if (std::ranges::find(devices, device) == devices.end()) {
      devices.push_back(device);
    }
  }
  for (const auto& device : devices) {
    add_generator(generators_, at::globalContext().defaultGenerator(device));
  }
}

ForwardConditions::Restored::Restored(const ForwardConditions& conditions)
    : cpu_(at::kCPU, conditions.cpu_.dtype, conditions.cpu_.enabled,
           conditions.cache_enabled_) {
  if (const auto& state = conditions.accelerator_) {
    accelerator_.emplace(state->device, state->dtype, state->enabled,
                         conditions.cache_enabled_);
  }
  for (const auto& [generator, state] : conditions.generators_) {
    add_generator(before_, generator);
  }
  restore_generators(conditions.generators_);
}

ForwardConditions::Restored::~Restored() { restore_generators(before_); }

InputVersions::InputVersions(const std::vector<at::Tensor>& inputs) {
  for (const auto& input : inputs) versions_.push_back(input._version());
}

void InputVersions::require_unchanged(
    const std::vector<at::Tensor>& inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i]._version() == versions_[i]) continue;
    throw std::invalid_argument(
        "checkpoint: the function has changed tensor " + std::to_string(i + 1) +
        " of its arguments in place, so it would be recomputed from another "
        "value; use operations that are not in place, or give it a clone()");
  }
}

ParameterVersions::ParameterVersions(const torch::nn::Module* module,
                                     std::vector<at::Tensor> leaves)
    : module_(module),
      parameters_(module == nullptr ? std::move(leaves)
                                    : module->parameters()) {
  for (const auto& parameter : parameters_) {
    versions_.push_back(version_of(parameter));
  }
}

void ParameterVersions::require_unchanged() const {
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (version_of(parameters_[i]) == versions_[i]) continue;
    throw CheckpointError(
        c10::str("checkpoint: a recomputation has written ",
                 module_ == nullptr
                     ? c10::str("a parameter of shape ", parameters_[i].sizes())
                     : c10::str("parameter '",
                                module_->named_parameters()[i].key(), "'"),
                 ", which forward had written before; write it outside of the "
                 "checkpointed part"));
  }
}

std::vector<at::Tensor> leaves_since(const std::vector<at::Tensor>& results,
                                     uint64_t since) {
  const auto thread = at::RecordFunction::currentThreadId();
  return graph_leaves(results, [&](const torch::autograd::Node& node) {
    return node.sequence_nr() == UINT64_MAX ||  // a leaf
           (node.thread_id() == thread && node.sequence_nr() >= since);
  });
}

}  // namespace lockstep::internal
