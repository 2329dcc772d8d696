#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// What a torch::optim::Optimizer also is that steps only a part of the
// parameters on each rank (ZeroRedundancyOptimizer): where gradients are final
// only in the part that the rank owns, clipping and unscaling work on that part
// and agree over the group. For the thread that trains.
class GradientShards {
 public:
  // The ranks that together hold all gradients, each element once.
  virtual const ProcessGroupPtr& shard_group() const = 0;

  // This rank's part: tensors that share memory with the parameters'
  // gradients; parameters without gradient are left out. Writing to them
  // changes what step() uses. Throws std::logic_error where the gradients are
  // used up before step() (stepping in backward), and in a join() that shadows
  // ranks without inputs, saying so. Collective, and waiting as such, only
  // where a parameter group was added since the last step; else it does not
  // block.
  virtual std::vector<at::Tensor> gradient_shards() = 0;

 protected:
  ~GradientShards() = default;
};

}  // namespace lockstep
