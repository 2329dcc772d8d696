#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

// The states of the default generators of the CPU and of the accelerators on
// which a model is, in the order of its tensors: one after the other in one
// tensor of bytes. A null model is on none.
namespace lockstep::internal {

at::Tensor generator_state(const torch::nn::Module* model);
// A generator of an accelerator that `state` lacks keeps its own.
void set_generator_state(const at::Tensor& state,
                         const torch::nn::Module* model);

// Returns the state that `rank` of `size` takes from a snapshot in which
// `saved` ranks have saved theirs, of which state_of(r) returns one: its own,
// if the number of ranks is the same; otherwise one that is seeded from rank
// 0's state and from `rank`. Returns nothing if `saved` is 0: the rank keeps
// its own. Throws SnapshotError about `path` if the state is not one of these
// generators.
std::optional<at::Tensor> generator_state_for(
    const std::string& path, size_t saved,
    const std::function<at::Tensor(size_t)>& state_of, size_t rank, size_t size,
    const torch::nn::Module* model);

}  // namespace lockstep::internal
