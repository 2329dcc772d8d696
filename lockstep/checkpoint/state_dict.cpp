#include "lockstep/checkpoint/state_dict.h"

#include <stdexcept>

#include "lockstep/checkpoint/module_state.h"

namespace lockstep {

void save_state_dict(const std::string& path, const torch::nn::Module& module) {
  write_state_dict(path, capture_module(module));
}

void load_state_dict(const std::string& path, torch::nn::Module& module) {
  const NamedTensors tensors = read_snapshot(path).model_state;
  try {
    restore_module(module, tensors);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(path + ": " + error.what());
  }
}

}  // namespace lockstep
