#pragma once

#include <torch/nn/module.h>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep {

// The parameters and buffers of `module` under Python's names and in Python's
// order (torch.nn.Module.state_dict: of each module its parameters, then its
// buffers, then its children). Tensors that are not defined (a Linear without
// bias) are left out. The tensors are detached and share their memory with the
// module: write them before the next step.
NamedTensors capture_module(const torch::nn::Module& module);

// Throws std::invalid_argument that names everything at once (the first few of
// each kind): what `module` has and `state` lacks, what it has too much, where
// shape or dtype differ. Names that all begin with "module.", as those of a
// model that Python's DistributedDataParallel wraps, are taken without it.
void check_module_state(const torch::nn::Module& module,
                        const NamedTensors& state);

// check_module_state(), then copies into the tensors that `module` has:
// whatever shares their memory sees the new values. If it throws, nothing has
// been changed.
void restore_module(torch::nn::Module& module, const NamedTensors& state);

}  // namespace lockstep
