#include "tests/simulated_cuda/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <mutex>

#include "tests/simulated_cuda/settings.h"

namespace lockstep::internal::simulated_cuda {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl({kDeviceType, device}, kDeviceKey) {}

  void set_current_seed(uint64_t seed) override {
    state_ = {.seed = seed, .offset = 0};
  }
  uint64_t current_seed() const override { return state_.seed; }
  void set_offset(uint64_t offset) override { state_.offset = offset; }
  uint64_t get_offset() const override { return state_.offset; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return state_.seed;
  }
  // CUDA's state, too, is the seed and the offset in 16 bytes.
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == sizeof(State), "RNG state is wrong size");
    std::memcpy(&state_, state.data(), sizeof(State));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu(
        {static_cast<int64_t>(sizeof(State))}, at::kByte, {}, {}, {}, {});
    std::memcpy(state.mutable_data_ptr(), &state_, sizeof(State));
    return state.getIntrusivePtr();
  }

 private:
  struct State {
    uint64_t seed = c10::default_rng_seed_val;
    uint64_t offset = 0;
  };
  DeviceGenerator* clone_impl() const override {
    auto* const clone = new DeviceGenerator(device().index());
    clone->state_ = state_;
    return clone;
  }

  State state_;
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* const generators = [] {
    auto* const made = new std::array<at::Generator, kMostDevices>;
    for (int index = 0; index < kMostDevices; ++index) {
      (*made)[static_cast<size_t>(index)] =
          new_generator(static_cast<c10::DeviceIndex>(index));
    }
    return made;
  }();
  return (*generators)[static_cast<size_t>(device)];
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device);
}

at::Generator generator_for_operation(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kDeviceType, "Expected a '",
              kDeviceType, "' device type for generator but found '",
              generator.device().type(), "'");
  at::Generator from = generator;
  const std::lock_guard lock(from.mutex());
  const uint64_t offset = from.get_offset();
  from.set_offset(offset + 4);
  return at::detail::createCPUGenerator(from.current_seed() +
                                        0x9e3779b97f4a7c15U * offset);
}

}  // namespace lockstep::internal::simulated_cuda
