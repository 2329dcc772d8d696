#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <concepts>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lockstep/parallel/checkpointing/checkpoint_options.h"
#include "lockstep/parallel/checkpointing/checkpointed_call.h"

// Activation checkpointing: what the operations of a function save for backward
// is not kept, but computed again during backward. It follows
// torch.utils.checkpoint (PyTorch documentation). What keeps training on disk
// is a snapshot (lockstep/checkpoint).
namespace lockstep {

// Returns function(args...), or function->forward(args...) if the function is a
// module's holder or pointer. A FullyShard is called as the unit that it is. In
// grad mode, backward calls it once more to compute what its operations have
// saved; only the tensors among the arguments are kept until then. Gradients
// are those without checkpointing, and every hook sees what it would see
// without it.
// Outside of grad mode this is a plain call.
//
//   auto y = lockstep::checkpoint(block, x);
//   auto z = lockstep::checkpoint({.early_stop = false}, block, y);
//   auto w = lockstep::checkpoint(
//       [&](const torch::Tensor& t) { return last(t).relu(); }, z);
//
// The function and all arguments are copied (moved, if the function is an
// rvalue) and must be valid until the graph is freed: what a lambda captures by
// reference must live on. Tensors are found in standard containers and in types
// for which ForwardResult is defined (module/forward_result.h); other arguments
// are passed as they are. The result may have any type. What the function puts
// into reference arguments has its graph, as without checkpointing.
//
// The second call must compute the same as the first one. Before it the states
// of the default generators (of the CPU, and of the GPUs of the arguments) and
// autocast are restored. The function must not change its arguments in place
// (std::invalid_argument), and the second call must not write parameters
// (CheckpointError; not seen in a function that is not a module if the tensors
// of its result are not found). Buffers are
// updated by both calls (the running statistics of a batch norm, as in Python).
// No parameter may change between forward and backward.
//
// Calls nest. Forward and backward may run in different threads. But if the
// function draws random numbers, no other thread may draw from the same
// generators while forward or backward runs it: the recomputation would draw
// other numbers than forward, and gradients would be wrong without an error.
// Several CPU replicas of a DataParallel (data_parallel.h) do that, so there a
// call with preserve_rng_state throws std::invalid_argument. Does not block,
// unless another thread recomputes the same call.
//
// Backward throws CheckpointError if the second call differs from the first one
// in number, shape, dtype or device of what its operations save, or if such a
// tensor was changed in place.
template <typename Function, typename... Args>
auto checkpoint(const CheckpointOptions& options, Function&& function,
                Args&&... args) {
  return internal::checkpointed(options, std::forward<Function>(function),
                                std::forward<Args>(args)...);
}

template <typename Function, typename... Args>
  requires(!std::same_as<std::remove_cvref_t<Function>, CheckpointOptions>)
auto checkpoint(Function&& function, Args&&... args) {
  return checkpoint(CheckpointOptions{}, std::forward<Function>(function),
                    std::forward<Args>(args)...);
}

// Returns functions->forward(input), in which the modules are divided into
// `segments` parts of equal number; each part is one call of checkpoint(),
// except the last one, which has the rest. Every module must take and return
// one tensor.
//
// Throws std::invalid_argument unless `segments` is from 1 to the number of
// modules.
at::Tensor checkpoint_sequential(const torch::nn::Sequential& functions,
                                 int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options = {});

}  // namespace lockstep
