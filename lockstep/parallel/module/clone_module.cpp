#include "lockstep/parallel/module/clone_module.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <typeinfo>

#include "lockstep/comm/tensor_layout.h"

namespace lockstep::internal {
namespace {

class KeepGenerator {
 public:
  KeepGenerator() : generator_(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  KeepGenerator(const KeepGenerator&) = delete;
  KeepGenerator& operator=(const KeepGenerator&) = delete;
  ~KeepGenerator() {
    std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

// A Sequential's clone() is in training mode whatever the original is in.
void copy_modes(torch::nn::Module& copy, const torch::nn::Module& original) {
  const auto set = [](torch::nn::Module& to, const torch::nn::Module& from) {
    if (to.is_training() != from.is_training()) to.train(from.is_training());
  };
  // train() also sets the children, so outer modules come before inner ones.
  set(copy, original);
  const auto copies = copy.modules(/*include_self=*/false);
  const auto originals = original.modules(/*include_self=*/false);
  for (size_t i = 0; i < std::min(copies.size(), originals.size()); ++i) {
    set(*copies[i], *originals[i]);
  }
}

// A copy of a shard would be a tensor of this rank's elements that no unit
// gathers.
void require_no_shards(const torch::nn::Module& module,
                       const std::string& purpose) {
  for (const auto& parameter : module.named_parameters()) {
    const auto* layout = layout_of(parameter.value());
    if (layout == nullptr || !layout->range) continue;
    throw std::invalid_argument(
        purpose + " " + module.name() + ": FullyShard has divided its '" +
        parameter.key() +
        "', and a copy has no unit that gathers it; make a second FullyShard "
        "of a new module (AveragedModel takes its module() as the copy)");
  }
}

// The placement of a parameter holds for its copy, too.
void copy_layouts(const torch::nn::Module& copy,
                  const torch::nn::Module& original) {
  const auto set = [](const std::vector<at::Tensor>& to,
                      const std::vector<at::Tensor>& from) {
    for (size_t i = 0; i < std::min(to.size(), from.size()); ++i) {
      const auto* layout = layout_of(from[i]);
      if (layout != nullptr && layout_of(to[i]) == nullptr) {
        set_layout(to[i], *layout);
      }
    }
  };
  set(copy.parameters(), original.parameters());
  set(copy.buffers(), original.buffers());
}

}  // namespace

void throw_not_cloneable(const torch::nn::Module& module,
                         const std::string& why, const std::string& purpose) {
  throw std::invalid_argument(
      purpose + " " + module.name() + ": " + why +
      ". It must be torch::nn::Cloneable, with all registration in reset(), "
      "or define a clone() that copies it; this holds for modules in a "
      "Sequential, too.");
}

std::shared_ptr<torch::nn::Module> clone_module(
    const torch::nn::Module& module, std::optional<at::Device> device,
    const std::string& purpose) {
  require_no_shards(module, purpose);
  KeepGenerator keep;
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = module.clone(device);
  } catch (const c10::Error& error) {
    throw_not_cloneable(module, error.msg(), purpose);
  }
  const auto& original = module;
  const auto* made = copy.get();
  if (made == nullptr || made == &module || typeid(*made) != typeid(original)) {
    throw_not_cloneable(module,
                        "its clone() did not return another module of its type",
                        purpose);
  }
  copy_modes(*copy, module);
  copy_layouts(*copy, module);
  return copy;
}

}  // namespace lockstep::internal
