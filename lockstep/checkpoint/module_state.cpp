#include "lockstep/checkpoint/module_state.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>

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

// "a, b, c and 7 more"
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

std::map<std::string, at::Tensor> by_name(const NamedTensors& state,
                                          const NamedTensors& own) {
  const auto wrapped = [](const auto& item) {
    return item.first.starts_with(kWrapperPrefix);
  };
  const bool strip = std::all_of(state.begin(), state.end(), wrapped) &&
                     std::none_of(own.begin(), own.end(), wrapped);
  std::map<std::string, at::Tensor> named;
  for (const auto& [name, tensor] : state) {
    named.emplace(strip ? name.substr(kWrapperPrefix.size()) : name, tensor);
  }
  return named;
}

std::map<std::string, at::Tensor> checked(const NamedTensors& own,
                                          const NamedTensors& state) {
  std::map<std::string, at::Tensor> given = by_name(state, own);
  std::vector<std::string> missing;
  std::vector<std::string> surplus;
  std::vector<std::string> different;
  std::map<std::string, at::Tensor> expected(own.begin(), own.end());
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      missing.push_back(name);
    } else if (found->second.sizes() != tensor.sizes() ||
               found->second.scalar_type() != tensor.scalar_type()) {
      different.push_back(name + " (snapshot " + describe(found->second) +
                          ", model " + describe(tensor) + ")");
    }
  }
  for (const auto& [name, tensor] : given) {
    if (!expected.contains(name)) surplus.push_back(name);
  }
  std::string wrong;
  const auto add = [&](const char* what, const auto& items) {
    if (items.empty()) return;
    wrong += (wrong.empty() ? "" : "; ") + std::string(what) + list_of(items);
  };
  add("the snapshot lacks ", missing);
  add("the model lacks ", surplus);
  add("they differ in ", different);
  if (!wrong.empty()) {
    throw std::invalid_argument(
        "the snapshot is of another model: " + wrong +
        "; build the model that was saved, or name another snapshot");
  }
  return given;
}

}  // namespace

NamedTensors capture_module(const torch::nn::Module& module) {
  NamedTensors state;
  collect(module, "", state);
  return state;
}

void check_module_state(const torch::nn::Module& module,
                        const NamedTensors& state) {
  checked(capture_module(module), state);
}

void restore_module(torch::nn::Module& module, const NamedTensors& state) {
  const at::NoGradGuard no_grad;
  const NamedTensors own = capture_module(module);
  const auto given = checked(own, state);
  for (const auto& [name, tensor] : own) tensor.copy_(given.at(name));
}

}  // namespace lockstep
