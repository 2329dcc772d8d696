#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::internal {

// Returns what a stage's forward is called with in place of `inputs`: aliases,
// tensors of the same memory whose gradients go to `inputs`. What the stage
// before has sent are leaves here, which may not be changed in place while they
// require grad, but in one process they are results of the layer before, which
// may be: so may the aliases. Nor are these views, as the parts of a batch are.
// Where grad mode is off, they have no history.
std::vector<at::Tensor> stage_inputs(const std::vector<at::Tensor>& inputs);

// Call it after forward: tells autograd which inputs forward has changed in
// place, so that a backward that needs the old values throws, as in one
// process.
void report_changes(const std::vector<at::Tensor>& inputs,
                    const std::vector<at::Tensor>& aliases);

}  // namespace lockstep::internal
