#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/zero/parameter_piece.h"

namespace lockstep {

// A piece and its parameter's number, counted through all groups as in
// OptimizerState.
struct NumberedPiece {
  int64_t parameter;
  const ParameterPiece* piece;
};

// Collective. Adds to `whole` of the group's rank `to`, which has the options
// and no state, the state that the ranks have of their pieces; it is left as it
// is on the others. `mine`: what capture_optimizer() gives of the optimizer
// over `pieces`. `parameters`: all, by number.
//
// Blocks until this rank's part is sent, and all is there on `to`.
void gather_state(OptimizerState& whole, const OptimizerState& mine,
                  const std::vector<NumberedPiece>& pieces,
                  const std::vector<at::Tensor>& parameters, int to,
                  const ProcessGroupPtr& group);

// The reverse: the state of an optimizer over `pieces`, without groups. The
// tensors share the memory of those of `whole`, which must be laid out as their
// parameters are.
OptimizerState slice_state(const OptimizerState& whole,
                           const std::vector<NumberedPiece>& pieces);

}  // namespace lockstep
