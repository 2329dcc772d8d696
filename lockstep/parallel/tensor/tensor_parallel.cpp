#include "lockstep/parallel/tensor/tensor_parallel.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

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
  std::vector<internal::NamedParameter> tensors;
  {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    tensors.push_back(
        {"the state of the default generator", generator.get_state()});
  }
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
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
  const uint32_t draw = cpu->random();
  state_ = generator.get_state();
  cpu->set_current_seed(mixed(draw + static_cast<uint32_t>(group->rank())));
}

TensorParallelRandom::~TensorParallelRandom() {
  if (!state_.defined()) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state_);
}

}  // namespace lockstep
