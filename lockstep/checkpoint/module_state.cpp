#include "lockstep/checkpoint/module_state.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/comm/tensor_layout.h"

namespace lockstep {
namespace {

void collect(const torch::nn::Module& module, const std::string& prefix,
             std::vector<internal::ModuleTensor>& into) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (item.value().defined()) {
      into.push_back({prefix + item.key(), item.value(), true});
    }
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined()) {
      into.push_back({prefix + item.key(), item.value(), false});
    }
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", into);
  }
}

std::string describe(const at::Tensor& tensor) {
  const auto* layout = internal::layout_of(tensor);
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type())
       << (layout ? at::IntArrayRef(layout->shape) : tensor.sizes());
  return text.str();
}

// Lists the first items: "a, b, c and 7 more".
std::string list_of(const std::vector<std::string>& items) {
  constexpr size_t kShown = 5;
  std::string text;
  for (size_t i = 0; i < std::min(items.size(), kShown); ++i) {
    text += (i > 0 ? ", " : "") + items[i];
  }
  if (items.size() > kShown) {
    text += " and " + std::to_string(items.size() - kShown) + " more";
  }
  return text;
}

// Returns `state` without the "module." prefix of a DistributedDataParallel, if
// all its names have it and no tensor of the module (`own`) does.
NamedTensors without_wrapper(NamedTensors state,
                             const std::vector<internal::ModuleTensor>& own) {
  if (std::all_of(state.begin(), state.end(),
                  [](const auto& item) {
                    return item.first.starts_with(internal::kWrapperPrefix);
                  }) &&
      std::none_of(own.begin(), own.end(), [](const auto& tensor) {
        return tensor.name.starts_with(internal::kWrapperPrefix);
      })) {
    for (auto& [name, tensor] : state) {
      name.erase(0, internal::kWrapperPrefix.size());
    }
  }
  return state;
}

bool fits(const at::Tensor& given, const at::Tensor& own, bool convert) {
  const bool converts =
      convert && given.is_floating_point() && own.is_floating_point();
  const auto* layout = internal::layout_of(own);
  const bool whole = layout && given.sizes() == at::IntArrayRef(layout->shape);
  return (whole || given.sizes() == own.sizes()) &&
         (converts || given.scalar_type() == own.scalar_type());
}

// Throws if LibTorch would not copy values into the tensor.
void require_writable_tensor(const std::string& name,
                             const at::Tensor& tensor) {
  const bool overlaps = tensor.layout() == at::kStrided &&
                        at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
  if (!overlaps &&
      (!tensor.is_inference() || c10::InferenceMode::is_enabled())) {
    return;
  }
  throw std::invalid_argument(
      "the model's " + name +
      (overlaps ? " is an expanded tensor, whose elements share memory"
                : " is an inference tensor, which is written in inference mode "
                  "only") +
      ", so no values can be loaded into it; give the module its clone(), made "
      "outside of inference mode");
}

// Throws unless there are no items in the lists.
void require_same_model(const std::vector<std::string>& missing,
                        const std::vector<std::string>& unexpected,
                        const std::vector<std::string>& different) {
  std::string wrong;
  const auto add = [&](const char* what, const auto& items) {
    if (items.empty()) return;
    wrong += (wrong.empty() ? "" : "; ") + std::string(what) + list_of(items);
  };
  add("the snapshot lacks ", missing);
  add("the model lacks ", unexpected);
  add("they differ in ", different);
  if (wrong.empty()) return;
  throw std::invalid_argument(
      "the snapshot belongs to another model: " + wrong +
      "; build the model that was saved, or name another snapshot");
}

}  // namespace

namespace internal {

const Sizes* shape_if_part(const at::Tensor& tensor,
                           const at::Tensor& of_module) {
  const auto* layout = layout_of(of_module);
  const bool is_part =
      layout && tensor.sizes() != at::IntArrayRef(layout->shape);
  return is_part ? &layout->shape : nullptr;
}

void require_whole_tensors(const ModuleLoad& load,
                           const torch::nn::Module& module) {
  for (const auto& [from, to] : load.copies) {
    const Sizes* shape = shape_if_part(from, to);
    if (!shape) continue;
    std::ostringstream text;
    for (const auto& [name, tensor, is_parameter] : tensors_of(module)) {
      if (tensor.is_same(to)) text << name;
    }
    text << " has the shape " << from.sizes() << ", a part of the whole "
         << at::IntArrayRef(*shape)
         << " that is divided over ranks; save the whole model with "
            "full_state_dict() and save_tensors()";
    throw std::invalid_argument(text.str());
  }
}

void require_writable(const torch::nn::Module& module) {
  for (const ModuleTensor& tensor : tensors_of(module)) {
    require_writable_tensor(tensor.name, tensor.tensor);
  }
}

std::vector<ModuleTensor> tensors_of(const torch::nn::Module& module) {
  std::vector<ModuleTensor> tensors;
  collect(module, "", tensors);
  return tensors;
}

std::unordered_map<const c10::TensorImpl*, std::string> parameter_names(
    const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (auto& [name, tensor, is_parameter] : tensors_of(module)) {
    if (is_parameter) {
      names.emplace(tensor.unsafeGetTensorImpl(), std::move(name));
    }
  }
  return names;
}

ModuleLoad check_state_dict(const torch::nn::Module& module,
                            const NamedTensors& state,
                            const LoadStateDictOptions& options) {
  const std::vector<ModuleTensor> own = tensors_of(module);
  const NamedTensors named = without_wrapper(state, own);
  std::map<std::string, at::Tensor> given(named.begin(), named.end());
  std::erase_if(given, [](const auto& item) { return !item.second.defined(); });
  std::set<std::string> expected;
  ModuleLoad made;
  std::vector<std::string> different;
  // One of the names of a tensor (tied weights) is enough.
  std::map<TensorMemory, std::string> given_name;
  for (const auto& [name, tensor, is_parameter] : own) {
    if (given.contains(name) && may_be_tied(tensor)) {
      given_name.emplace(memory_of(tensor), name);
    }
  }
  for (const auto& [name, tensor, is_parameter] : own) {
    expected.insert(name);
    auto found = given.find(name);
    if (found == given.end() && may_be_tied(tensor)) {
      const auto other = given_name.find(memory_of(tensor));
      if (other != given_name.end()) found = given.find(other->second);
    }
    if (found == given.end()) {
      made.incompatible.missing_keys.push_back(name);
    } else if (!fits(found->second, tensor, options.convert)) {
      different.push_back(name + " (snapshot " + describe(found->second) +
                          ", model " + describe(tensor) + ")");
    } else {
      require_writable_tensor(name, tensor);
      made.copies.emplace_back(found->second, tensor);
    }
  }
  for (const auto& [name, tensor] : named) {
    if (!expected.contains(name) || !tensor.defined()) {
      made.incompatible.unexpected_keys.push_back(name);
    }
  }
  if (options.strict) {
    require_same_model(made.incompatible.missing_keys,
                       made.incompatible.unexpected_keys, different);
  } else {
    require_same_model({}, {}, different);
  }
  return made;
}

void require_same_keys(const IncompatibleKeys& keys) {
  require_same_model(keys.missing_keys, keys.unexpected_keys, {});
}

}  // namespace internal

NamedTensors state_dict(const torch::nn::Module& module) {
  NamedTensors state;
  for (auto& [name, tensor, is_parameter] : internal::tensors_of(module)) {
    state.emplace_back(std::move(name), tensor.detach());
  }
  return state;
}

IncompatibleKeys load_state_dict(torch::nn::Module& module,
                                 const NamedTensors& state,
                                 const LoadStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  internal::ModuleLoad made =
      internal::check_state_dict(module, state, options);
  for (const auto& [from, to] : made.copies) {
    const auto* layout = internal::layout_of(to);
    to.copy_(layout && from.sizes() == at::IntArrayRef(layout->shape)
                 ? internal::part_of(from, *layout)
                 : from);
  }
  return std::move(made.incompatible);
}

}  // namespace lockstep
