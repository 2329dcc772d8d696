#pragma once

#include <torch/nn/cloneable.h>

#include <memory>
#include <optional>

namespace lockstep::internal {

// The base of a module with parameters of which each rank has a part. LibTorch
// replaces what is in a parameter's tensor if the module is moved, cast, cloned
// or loaded, and the layout (comm/tensor_layout.h) goes with it; this class
// attaches it again.
template <typename Derived>
class DividedModule : public torch::nn::Cloneable<Derived> {
 public:
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device =
          std::nullopt) const override {
    auto copy = torch::nn::Cloneable<Derived>::clone(device);
    static_cast<const Derived&>(*copy).attach_layouts();
    return copy;
  }

  void to(torch::Device device, torch::Dtype dtype,
          bool non_blocking = false) override {
    torch::nn::Module::to(device, dtype, non_blocking);
    attach_layouts();
  }
  void to(torch::Dtype dtype, bool non_blocking = false) override {
    torch::nn::Module::to(dtype, non_blocking);
    attach_layouts();
  }
  void to(torch::Device device, bool non_blocking = false) override {
    torch::nn::Module::to(device, non_blocking);
    attach_layouts();
  }

  void load(torch::serialize::InputArchive& archive) override {
    torch::nn::Module::load(archive);
    attach_layouts();
  }

  // Attaches the layouts of the parameters. For the library.
  virtual void attach_layouts() const = 0;
};

}  // namespace lockstep::internal
