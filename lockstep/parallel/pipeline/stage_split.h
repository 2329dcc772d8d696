#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Returns stage `stage` of a Sequential that is divided by hand: the children
// from begins[stage] up to begins[stage + 1], or to the end. The children are
// shared, and keep their names, so that parameters of all stages together have
// the names of the whole. Throws std::invalid_argument if `begins` does not
// begin with 0, does not ascend, or leaves a stage without children.
torch::nn::Sequential stage_of(const torch::nn::Sequential& whole,
                               const std::vector<int64_t>& begins, int stage);

// Returns where stages begin if consecutive children with these costs are
// divided such that the most expensive stage is as cheap as possible. Each
// stage gets at least one child. Throws std::invalid_argument if there are
// fewer children than stages.
std::vector<int64_t> balanced_begins(const std::vector<double>& costs,
                                     int stages);

// Measures how many seconds forward and backward of each child take for
// `input`, the shortest of three times. It clears gradients that there are, and
// restores buffers, such as the means of batch norms, and the default
// generators of the CPU and of the children's devices.
std::vector<double> measured_costs(const torch::nn::Sequential& whole,
                                   const at::Tensor& input);

// Balances by costs that the first rank of the group measures. Collective; all
// ranks get the same. Null means the default group. Throws
// std::invalid_argument in a job that heals (healed_training.h), because a
// process that takes the place of a rank would measure something else.
std::vector<int64_t> balanced_begins(const torch::nn::Sequential& whole,
                                     const at::Tensor& input, int stages,
                                     const ProcessGroupPtr& group = {});

}  // namespace lockstep
