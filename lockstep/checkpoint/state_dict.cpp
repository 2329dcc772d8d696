#include "lockstep/checkpoint/state_dict.h"

#include <stdexcept>

namespace lockstep {

void save_state_dict(const std::string& path, const torch::nn::Module& module) {
  write_state_dict(path, capture_module(module));
}

IncompatibleKeys load_state_dict(const std::string& path,
                                 torch::nn::Module& module,
                                 const LoadStateDictOptions& options) {
  NamedTensors tensors = read_state_dict(path, options.key);
  try {
    return restore_module(
        module, options.rename.apply(std::move(tensors)),
        {.strict = options.strict, .convert = options.convert});
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        path + ": " + error.what() +
        " (load_state_dict() has the options rename, strict and convert)");
  }
}

}  // namespace lockstep
