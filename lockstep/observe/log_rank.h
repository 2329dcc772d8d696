#pragma once

namespace lockstep::internal {

// Returns the rank that this process logs as: its rank in the default group if
// there is one, otherwise the one that the launcher's variable RANK gives it,
// otherwise 0.
int log_rank();
// Returns the number of ranks, found alike: of the default group, from
// WORLD_SIZE, or 1.
int log_world_size();

}  // namespace lockstep::internal
