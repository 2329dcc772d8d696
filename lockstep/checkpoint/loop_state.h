#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/state/state_tree.h"

// The numbers that a learning-rate scheduler keeps for each parameter group: in
// memory they are `param_groups` of the scheduler's state
// (resumable_scheduler.h), in a snapshot they are where Python has them, among
// the options of the optimizer's groups. Those that Python does not have stay
// in the scheduler's state.
namespace lockstep::internal {

// Throws std::invalid_argument if there is a scheduler without an optimizer.
void require_optimizer(const TrainingState& state);

// Stores the state of the scheduler whose optimizer's state is in `snapshot`.
// Throws std::invalid_argument if it has another number of groups.
void set_scheduler_state(Snapshot& snapshot, StateTree state);

// Returns the state of the snapshot's scheduler, which must have one. Among its
// `param_groups` are the numbers of all options of the optimizer's groups.
StateTree scheduler_state_of(const Snapshot& snapshot);

// Return and set the states of the default generators of the CPU and of the
// accelerators on which `model` is, in the order of its tensors: one after the
// other in one tensor of bytes. A null model is on none. A generator of an
// accelerator that `state` lacks keeps its own.
at::Tensor generator_state(const torch::nn::Module* model);
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
