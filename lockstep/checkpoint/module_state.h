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

struct RestoreModuleOptions {
  // Python's: false takes the tensors that both have and leaves the others of
  // `module` as they are. A shape or dtype that differs is an error even so.
  bool strict{true};
  // Whether a tensor of another floating-point dtype (bfloat16 weights for a
  // float32 model, or the other way round) is converted to the module's. Other
  // dtypes are never converted.
  bool convert{false};
};

// What a restore left out, under the names of `module`: those that `module` has
// and the state lacks, in the module's order, and those that the state has and
// `module` lacks, in the state's order. Both are empty if it was strict. What
// torch.nn.Module.load_state_dict returns in Python.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys{};
  std::vector<std::string> unexpected_keys{};
};

// Throws std::invalid_argument that names everything at once (the first few of
// each kind): what `module` has and `state` lacks, what it has too much (both
// only if strict), where shape or dtype differ. Names that all begin with
// "module.", as those of a model that Python's DistributedDataParallel wraps,
// are taken without it.
IncompatibleKeys check_module_state(const torch::nn::Module& module,
                                    const NamedTensors& state,
                                    const RestoreModuleOptions& options = {});

// check_module_state(), then copies into the tensors that `module` has:
// whatever shares their memory sees the new values. If it throws, nothing has
// been changed.
IncompatibleKeys restore_module(torch::nn::Module& module,
                                const NamedTensors& state,
                                const RestoreModuleOptions& options = {});

}  // namespace lockstep
