#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>

namespace lockstep::internal {

// Returns module.clone(device) in the modes (training or not) of the original,
// and leaves the default generator's state unchanged: clone() initialises
// parameters before it copies them, with the generator from which training
// draws, too. Placements of parameters (comm/placement.h) are copied.
//
// Throws std::invalid_argument if the module has no clone() that returns
// another module of its type, or is divided by FullyShard; the message begins
// with `purpose` ("DataParallel cannot replicate").
std::shared_ptr<torch::nn::Module> clone_module(
    const torch::nn::Module& module, std::optional<at::Device> device,
    const std::string& purpose);

[[noreturn]] void throw_not_cloneable(const torch::nn::Module& module,
                                      const std::string& why,
                                      const std::string& purpose);

}  // namespace lockstep::internal
