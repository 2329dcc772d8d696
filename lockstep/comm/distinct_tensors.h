#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// `tensors`, each where it stands first. LibTorch's module->parameters() names
// a parameter that is registered twice (tied weights) twice, Python's names it
// once; what steps, scales or counts parameters must do so once:
//
//   torch::optim::SGD optimizer(distinct(net->parameters()), 0.1);
//
// Lockstep's own functions and optimizers do this themselves.
std::vector<at::Tensor> distinct(std::vector<at::Tensor> tensors);

}  // namespace lockstep
