#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/parallel/checkpointing/checkpoint_options.h"
#include "lockstep/parallel/checkpointing/checkpointed_call.h"

namespace lockstep::internal {

// The two forms of checkpoint(). `inputs`: the tensors of the call's arguments.
// Both throw std::invalid_argument if the call has changed one of them in
// place.

// Runs `first`, which makes the call, so that autograd records it and keeps
// nothing that its operations save (region.h).
void recorded_checkpoint(const CheckpointOptions& options,
                         std::unique_ptr<CheckpointedCall> call,
                         const std::function<void()>& first,
                         const std::vector<at::Tensor>& inputs);

// Returns the tensors that `first` returns, which makes the call under no_grad.
// Their backward makes the call again with a graph and runs a backward pass
// over it, which adds to the gradients of parameters; the gradients of `inputs`
// are passed on.
//
// Throws std::invalid_argument if no input requires grad. Backward throws
// std::runtime_error if it has `inputs` or create_graph, CheckpointError if the
// recomputation returns another number of tensors, or others.
std::vector<at::Tensor> reentrant_checkpoint(
    const CheckpointOptions& options, std::shared_ptr<CheckpointedCall> call,
    const std::function<std::vector<at::Tensor>()>& first,
    const std::vector<at::Tensor>& inputs);

}  // namespace lockstep::internal
