#include "lockstep/checkpoint/model_file.h"

#include <stdexcept>

namespace lockstep {

void save_model(const std::string& path, const torch::nn::Module& module) {
  save_tensors(path, state_dict(module));
}

IncompatibleKeys load_model(const std::string& path, torch::nn::Module& module,
                            const LoadModelOptions& options) {
  NamedTensors tensors = load_tensors(path, options.key);
  try {
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
