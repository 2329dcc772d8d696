#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

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

// Returns all parameters of the module, in the order of named_parameters(),
// including undefined ones and tied ones as often as they are registered. A
// wrapper keeps what its module had when it was wrapped.
std::vector<at::Tensor> registered_parameters(const torch::nn::Module& module);

// Throws std::invalid_argument if `module` has other parameters now than
// `before`, or the same in another order. `wrapper` is named in the error, and
// `consequence` says what follows: "would not be averaged". Costs some
// nanoseconds for each parameter.
void require_registered(const torch::nn::Module& module,
                        const std::vector<at::Tensor>& before,
                        const char* wrapper, const char* consequence);

}  // namespace lockstep::internal
