#include "lockstep/checkpoint/model_file.h"

#include <map>
#include <stdexcept>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/sharded/sharded_load.h"

namespace lockstep::internal {

Renaming::Renaming(Prefixes prefixes) {
  function_ = [prefixes = std::move(prefixes)](const std::string& name) {
    for (const auto& [from, to] : prefixes) {
      if (name.starts_with(from)) return to + name.substr(from.size());
    }
    return name;
  };
}

NamedTensors Renaming::apply(NamedTensors tensors) const {
  if (!function_) return tensors;
  std::map<std::string, std::string> before;  // by the new name
  for (auto& [name, tensor] : tensors) {
    std::string renamed = function_(name);
    const auto [other, is_new] = before.emplace(renamed, name);
    if (!is_new) {
      throw std::invalid_argument(
          "rename makes \"" + renamed + "\" of both \"" + other->second +
          "\" and \"" + name + "\"; give each tensor a name of its own");
    }
    name = std::move(renamed);
  }
  return tensors;
}

}  // namespace lockstep::internal

namespace lockstep {
namespace {

void require_whole_model(const torch::nn::Module& module) {
  for (const auto& [name, tensor, is_parameter] :
       internal::tensors_of(module)) {
    if (!internal::shape_if_part(tensor, tensor)) continue;
    throw std::invalid_argument(
        "save_model(): the model's " + name +
        " is divided over ranks, and this rank has only a part of it; call "
        "full_state_dict() on all ranks, and save_tensors() with its result on "
        "the first");
  }
}

}  // namespace

void save_model(const std::string& path, const torch::nn::Module& module) {
  require_whole_model(module);
  save_tensors(path, state_dict(module));
}

IncompatibleKeys load_model(const std::string& path, torch::nn::Module& module,
                            const LoadModelOptions& options) {
  const auto files = internal::open_weights(path, options.mmap);
  if (files && !options.key.empty()) {
    throw std::invalid_argument(path + ": safetensors files have no entry \"" +
                                options.key +
                                "\", only tensors; load them without a key");
  }
  NamedTensors tensors;
  if (!files) tensors = internal::load_state_dict_file(path, options.key);
  try {
    if (files) return internal::load_weights(*files, module, options);
    tensors = options.rename.apply(std::move(tensors));
    const LoadStateDictOptions load{.strict = options.strict,
                                    .convert = options.convert};
    internal::require_whole_tensors(
        internal::check_state_dict(module, tensors, load), module);
    return load_state_dict(module, tensors, load);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        path + ": " + error.what() +
        " (load_model() has the options rename, strict and convert)");
  }
}

}  // namespace lockstep
