#include "lockstep/parallel/tensor/tensor_parallel_random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <mutex>

#include "lockstep/comm/accelerator.h"
#include "lockstep/parallel/tensor/tensor_part.h"

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

TensorParallelRandom::TensorParallelRandom(const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  if (!group) return;
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  const auto accelerator = internal::visible_accelerator();
  if (accelerator && group->has_backend(*accelerator)) {
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
