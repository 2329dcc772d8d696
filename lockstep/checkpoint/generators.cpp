#include "lockstep/checkpoint/generators.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {

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
