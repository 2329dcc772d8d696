#include "lockstep/parallel/tensor/tensor_parallel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/ddp/equal_replicas.h"
#include "lockstep/parallel/tensor/tensor_part.h"
#include "lockstep/trace/current_call.h"

namespace lockstep {
namespace {

// Returns another number for each number (the finaliser of MurmurHash3), so
// that ranks never have equal seeds. The generator uses 32 bits of a seed.
uint32_t mixed(uint32_t number) {
  number = (number ^ (number >> 16)) * 0x85ebca6bU;
  number = (number ^ (number >> 13)) * 0xc2b2ae35U;
  return number ^ (number >> 16);
}

}  // namespace

void verify_replicated(const torch::nn::Module& module,
                       const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  if (!group) return;
  const internal::UserFunction function("verify_replicated()");
  std::vector<internal::NamedParameter> tensors{
      {"the state of the default generator",
       internal::generator_state(&module)}};
  auto add = [&](const auto& named) {
    for (const auto& item : named) {
      if (internal::is_divided_over(item.value(), *group)) continue;
      tensors.push_back({"'" + item.key() + "'", item.value()});
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  const auto difference = internal::replica_difference(tensors, group);
  if (difference.empty()) return;
  throw std::runtime_error(
      "verify_replicated: " + difference +
      ", but the ranks of a tensor group must have the same; give them the "
      "same torch::manual_seed() before the model, and the same snapshot");
}

TensorParallelRandom::TensorParallelRandom(const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  if (!group) return;
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  const auto accelerator = internal::visible_accelerator();
  if (accelerator && internal::inside(*group).has_backend(*accelerator)) {
    generators.push_back(at::globalContext().defaultGenerator(
        c10::impl::VirtualGuardImpl(*accelerator).getDevice()));
  }
  uint32_t draw = 0;
  for (auto& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    if (states_.empty()) {
      draw = at::check_generator<at::CPUGeneratorImpl>(generator)->random();
    }
    states_.emplace_back(generator, generator.get_state());
    generator.set_current_seed(
        mixed(draw + static_cast<uint32_t>(group->rank())));
  }
}

TensorParallelRandom::~TensorParallelRandom() {
  for (auto& [generator, state] : states_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace lockstep
