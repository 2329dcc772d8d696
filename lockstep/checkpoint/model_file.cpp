#include "lockstep/checkpoint/model_file.h"

#include <map>
#include <sstream>
#include <stdexcept>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/sharded/sharded_load.h"
#include "lockstep/comm/tensor_layout.h"

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

// Returns the shape of the whole tensor if `tensor` is only a part of it;
// nullptr otherwise.
const internal::Sizes* shape_if_part(const at::Tensor& tensor,
                                     const at::Tensor& of_module) {
  const auto* layout = internal::layout_of(of_module);
  const bool is_part =
      layout && tensor.sizes() != at::IntArrayRef(layout->shape);
  return is_part ? &layout->shape : nullptr;
}

void require_whole_model(const torch::nn::Module& module) {
  for (const auto& [name, tensor, is_parameter] :
       internal::tensors_of(module)) {
    if (!shape_if_part(tensor, tensor)) continue;
    throw std::invalid_argument(
        "save_model(): the model's " + name +
        " is divided over ranks, and this rank has only a part of it; call "
        "full_state_dict() on all ranks, and save_tensors() with its result on "
        "the first");
  }
}

// Throws if a tensor that was given is the part of some rank, which need not be
// this one.
void require_whole_tensors(const internal::ModuleLoad& load,
                           const torch::nn::Module& module) {
  for (const auto& [from, to] : load.copies) {
    const internal::Sizes* shape = shape_if_part(from, to);
    if (!shape) continue;
    std::ostringstream text;
    for (const auto& [name, tensor, is_parameter] :
         internal::tensors_of(module)) {
      if (tensor.is_same(to)) text << name;
    }
    text << " has the shape " << from.sizes() << ", a part of the whole "
         << at::IntArrayRef(*shape)
         << " that is divided over ranks; save the whole model with "
            "full_state_dict() and save_tensors()";
    throw std::invalid_argument(text.str());
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
    require_whole_tensors(internal::check_state_dict(module, tensors, load),
                          module);
    return load_state_dict(module, tensors, load);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        path + ": " + error.what() +
        " (load_model() has the options rename, strict and convert)");
  }
}

}  // namespace lockstep
