#include "lockstep/parallel/module/module_contents.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
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

// Reads the member Module::children_, which is private: an explicit
// instantiation may name it. Its public accessors copy the list and its names,
// which would cost several microseconds in each forward.
using Children =
    torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>;
const Children& children_of(const torch::nn::Module& module);
template <Children torch::nn::Module::*member>
struct ReadsChildren {
  friend const Children& children_of(const torch::nn::Module& module) {
    return module.*member;
  }
};
template struct ReadsChildren<&torch::nn::Module::children_>;

struct OwnParameters : torch::nn::Module {
  static const auto& of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

// Calls `visit` with each parameter, in the order of named_parameters(),
// including undefined ones.
template <typename Visit>
void visit_parameters(const torch::nn::Module& module, const Visit& visit) {
  for (const auto& own : OwnParameters::of(module)) visit(own.value());
  for (const auto& child : children_of(module)) {
    visit_parameters(*child.value(), visit);
  }
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

std::vector<at::Tensor> registered_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  visit_parameters(module, [&all](const at::Tensor& parameter) {
    all.push_back(parameter);
  });
  return all;
}

void require_registered(const torch::nn::Module& module,
                        const std::vector<at::Tensor>& before,
                        const char* wrapper, const char* consequence) {
  size_t number = 0;
  bool same = true;
  visit_parameters(module, [&](const at::Tensor& parameter) {
    same &= number < before.size() && before[number].is_same(parameter);
    ++number;
  });
  if (same && number == before.size()) return;
  std::string what = "but not the same ones";
  std::string reason = "it still has the others";
  for (const auto& item : module.named_parameters()) {
    if (std::ranges::any_of(before, [&](const at::Tensor& known) {
          return known.is_same(item.value());
        })) {
      continue;
    }
    what = c10::str("and '", item.key(), "' of ", item.value().sizes(),
                    " was not among them");
    reason = c10::str("added or replaced ones ", consequence);
    break;
  }
  throw std::invalid_argument(c10::str(
      wrapper, ": the module has ", number, " parameters, ", what, ", but ",
      before.size(), " when it was wrapped; ", reason,
      ". Wrap the module, and make its optimizer, after the last change"));
}

}  // namespace lockstep::internal
