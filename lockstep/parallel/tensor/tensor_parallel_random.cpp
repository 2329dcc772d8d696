#include "lockstep/parallel/tensor/tensor_parallel_random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstdint>
#include <mutex>

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
