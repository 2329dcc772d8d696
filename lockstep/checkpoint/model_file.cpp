#include "lockstep/checkpoint/model_file.h"

#include <stdexcept>

#include "lockstep/checkpoint/sharded/sharded_load.h"

namespace lockstep {

void save_model(const std::string& path, const torch::nn::Module& module) {
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
  if (!files) tensors = load_tensors(path, options.key);
  try {
    if (files) return internal::load_weights(*files, module, options);
    return load_state_dict(
        module, options.rename.apply(std::move(tensors)),
        {.strict = options.strict, .convert = options.convert});
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        path + ": " + error.what() +
        " (load_model() has the options rename, strict and convert)");
  }
}

}  // namespace lockstep
