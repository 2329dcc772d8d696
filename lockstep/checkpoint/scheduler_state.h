#pragma once

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

}  // namespace lockstep::internal
