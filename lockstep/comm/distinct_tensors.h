#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// Returns `tensors` with each only at its first place. LibTorch's
// module->parameters() lists a parameter that is registered twice (tied
// weights) twice, Python's lists it once. Code that steps, scales or counts
// parameters must do so once for each:
//
//   torch::optim::SGD optimizer(distinct(net->parameters()), 0.1);
//
// Lockstep's own functions and optimizers do this themselves.
std::vector<at::Tensor> distinct(std::vector<at::Tensor> tensors);

}  // namespace lockstep
