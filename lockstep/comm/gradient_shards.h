#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// The interface of a torch::optim::Optimizer that steps only a part of the
// parameters on each rank (ZeroRedundancyOptimizer). Gradients may be final
// only in the shard that the rank owns; clipping and unscaling work on that
// shard and agree over the group. Only the thread that trains may call.
class GradientShards {
 public:
  // Returns the group whose ranks together hold all gradients, each element
  // once.
  virtual const ProcessGroupPtr& shard_group() const = 0;

  // Returns this rank's shard: tensors that share memory with the parameters'
  // gradients; parameters without a gradient are left out. Writing to them
  // changes what step() uses. Throws std::logic_error that says why if the
  // gradients are used up before step() (stepping in backward), and in a join()
  // that shadows ranks without inputs. It is collective, and waits for the
  // other ranks, only if a parameter group was added since the last step;
  // otherwise it does not block.
  virtual std::vector<at::Tensor> gradient_shards() = 0;

 protected:
  ~GradientShards() = default;
};

}  // namespace lockstep
