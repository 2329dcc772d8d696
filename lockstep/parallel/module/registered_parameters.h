#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <vector>

namespace lockstep::internal {

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
