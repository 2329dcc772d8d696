#pragma once

#include <torch/nn/module.h>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Checks what tensor parallelism takes for granted: that all ranks of `group`
// (null means the default group) have the same bits in each parameter and
// buffer of `module` that is not divided over ranks (biases of row-parallel
// layers, norms, position embeddings), and equal states of LibTorch's default
// generators, of the CPU and of the devices of `module`. Call it after
// constructing the model, and again if the ranks of a tensor group seem to
// drift apart: ranks with different values train without an error, but wrongly.
//
// Collective: one all_gather of 16 bytes; reads all tensors.
// Throws std::runtime_error, on every rank, with the rank and what differs.
// Nothing is changed. In a group of one, or without process groups, it does
// nothing.
void verify_replicated(const torch::nn::Module& module,
                       const ProcessGroupPtr& group = {});

}  // namespace lockstep
