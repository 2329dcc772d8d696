#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/zero/parameter_piece.h"

namespace lockstep::internal {

// A piece and its parameter's number, counted through all groups as in
// OptimizerState.
struct NumberedPiece {
  int64_t parameter;
  const ParameterPiece* piece;
};

// Collective. Collects the state that the ranks have for their pieces in
// `whole` on the group's rank `to`, where `whole` must have the options and no
// state; on other ranks `whole` is unchanged. `mine`: the result of
// state_dict() for the optimizer of `pieces`. `parameters`: all, by number.
//
// Blocks until this rank's part is sent and, on rank `to`, until everything has
// arrived.
void gather_state(OptimizerState& whole, const OptimizerState& mine,
                  const std::vector<NumberedPiece>& pieces,
                  const std::vector<at::Tensor>& parameters, int to,
                  const ProcessGroupPtr& group);

// Does the reverse: returns the state of an optimizer over `pieces`, without
// groups. Its tensors share the memory of those in `whole`, which must have the
// layout of their parameters.
OptimizerState slice_state(const OptimizerState& whole,
                           const std::vector<NumberedPiece>& pieces);

}  // namespace lockstep::internal
