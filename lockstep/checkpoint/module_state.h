#pragma once

#include <torch/nn/module.h>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep {

// Returns the parameters and buffers of `module` under Python's names and in
// Python's order (torch.nn.Module.state_dict: for each module its parameters,
// then its buffers, then its children). Tensors that are not defined (the bias
// of a Linear without one) are left out. The tensors are detached and share
// their memory with the module: save or copy them before the next step.
// If a parameter is divided over ranks, the result has this rank's part;
// full_state_dict() (full_state_dict.h) returns the whole parameter.
NamedTensors state_dict(const torch::nn::Module& module);

struct LoadStateDictOptions {
  // As in Python: false loads the tensors that both have and leaves the others
  // of `module` unchanged. A shape or dtype that differs is an error even then.
  // Set it to false to take over a part of another model.
  bool strict{true};

  // Whether a tensor of another floating-point dtype (bfloat16 weights for a
  // float32 model, or the other way round) is converted to the module's. Other
  // dtypes are never converted. Python always converts.
  bool convert{false};
};

// The names that load_state_dict() left out, as in the result of Python's
// torch.nn.Module.load_state_dict: names that `module` has and the state lacks,
// in the module's order; names that the state has and `module` lacks, in the
// state's order. Both are empty if it was strict.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys{};
  std::vector<std::string> unexpected_keys{};
};

// Copies the values into the tensors that `module` has: everything that shares
// their memory sees the new values. Returns the names that were left out. If
// all names in `state` begin with "module.", as for a model that Python's
// DistributedDataParallel wraps, that prefix is ignored. Of the names of one
// tensor (tied weights), `state` needs only one. A parameter that is
// divided over ranks takes this rank's part of a whole tensor, or a tensor that
// is such a part.
//
// Throws, before anything is changed, std::invalid_argument that names all
// differences at once (the first few of each kind): tensors that only `module`
// has, tensors that only `state` has (both only if strict), and tensors whose
// shape or dtype differs.
IncompatibleKeys load_state_dict(torch::nn::Module& module,
                                 const NamedTensors& state,
                                 const LoadStateDictOptions& options = {});

}  // namespace lockstep
