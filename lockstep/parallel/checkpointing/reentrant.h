#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/parallel/checkpointing/checkpoint_options.h"
#include "lockstep/parallel/checkpointing/checkpointed_call.h"

namespace lockstep::internal {

// Returns the tensors that `first` returns, which makes the call under no_grad.
// Their backward makes the call again with a graph and runs a backward pass
// over it, which adds to the gradients of parameters; the gradients of `inputs`
// (the tensors of the call's arguments) are passed on.
//
// Throws std::invalid_argument if no input requires grad, or if the call has
// changed one of them in place. Backward throws std::runtime_error if it has
// `inputs` or create_graph, CheckpointError if the recomputation returns
// another number of tensors, or others.
std::vector<at::Tensor> reentrant_checkpoint(
    const CheckpointOptions& options, std::shared_ptr<CheckpointedCall> call,
    const std::function<std::vector<at::Tensor>()>& first,
    const std::vector<at::Tensor>& inputs);

}  // namespace lockstep::internal
