#include "lockstep/checkpoint/module_state.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>

#include "lockstep/checkpoint/checked_load.h"

namespace lockstep {
namespace {

constexpr std::string_view kWrapperPrefix = "module.";

void collect(const torch::nn::Module& module, const std::string& prefix,
             NamedTensors& into) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (item.value().defined()) {
      into.emplace_back(prefix + item.key(), item.value().detach());
    }
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined()) {
      into.emplace_back(prefix + item.key(), item.value().detach());
    }
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", into);
  }
}

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << tensor.sizes();
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
NamedTensors without_wrapper(NamedTensors state, const NamedTensors& own) {
  const auto wrapped = [](const auto& item) {
    return item.first.starts_with(kWrapperPrefix);
  };
  if (std::all_of(state.begin(), state.end(), wrapped) &&
      std::none_of(own.begin(), own.end(), wrapped)) {
    for (auto& [name, tensor] : state) name.erase(0, kWrapperPrefix.size());
  }
  return state;
}

bool fits(const at::Tensor& given, const at::Tensor& own, bool convert) {
  const bool converts =
      convert && given.is_floating_point() && own.is_floating_point();
  return given.sizes() == own.sizes() &&
         (converts || given.scalar_type() == own.scalar_type());
}

struct Plan {
  // {tensor from the state, tensor of the module}
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  IncompatibleKeys incompatible;
};

Plan plan(const NamedTensors& own, const NamedTensors& state,
          const LoadStateDictOptions& options) {
  const NamedTensors named = without_wrapper(state, own);
  const std::map<std::string, at::Tensor> given(named.begin(), named.end());
  const std::map<std::string, at::Tensor> expected(own.begin(), own.end());
  Plan made;
  std::vector<std::string> different;
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      made.incompatible.missing_keys.push_back(name);
    } else if (!fits(found->second, tensor, options.convert)) {
      different.push_back(name + " (snapshot " + describe(found->second) +
                          ", model " + describe(tensor) + ")");
    } else {
      made.copies.emplace_back(found->second, tensor);
    }
  }
  for (const auto& [name, tensor] : named) {
    if (!expected.contains(name)) {
      made.incompatible.unexpected_keys.push_back(name);
    }
  }
  std::string wrong;
  const auto add = [&](const char* what, const auto& items) {
    if (items.empty()) return;
    wrong += (wrong.empty() ? "" : "; ") + std::string(what) + list_of(items);
  };
  if (options.strict) {
    add("the snapshot lacks ", made.incompatible.missing_keys);
    add("the model lacks ", made.incompatible.unexpected_keys);
  }
  add("they differ in ", different);
  if (!wrong.empty()) {
    throw std::invalid_argument(
        "the snapshot belongs to another model: " + wrong +
        "; build the model that was saved, or name another snapshot");
  }
  return made;
}

}  // namespace

NamedTensors state_dict(const torch::nn::Module& module) {
  NamedTensors state;
  collect(module, "", state);
  return state;
}

IncompatibleKeys internal::check_state_dict(
    const torch::nn::Module& module, const NamedTensors& state,
    const LoadStateDictOptions& options) {
  return plan(state_dict(module), state, options).incompatible;
}

IncompatibleKeys load_state_dict(torch::nn::Module& module,
                                 const NamedTensors& state,
                                 const LoadStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  Plan made = plan(state_dict(module), state, options);
  for (const auto& [from, to] : made.copies) to.copy_(from);
  return std::move(made.incompatible);
}

}  // namespace lockstep
