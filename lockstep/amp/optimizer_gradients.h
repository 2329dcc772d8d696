#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "lockstep/comm/collective_options.h"

// What clipping and unscaling share; not for users.
namespace lockstep::detail {

// The gradients that `optimizer` will step by on this rank.
struct OptimizerGradients {
  // Those of all its parameters that have one, each once; of a sharded
  // optimizer (GradientShards) this rank's part. They alias the gradients.
  std::vector<at::Tensor> tensors{};
  // The ranks that hold the other parts; null if this rank holds all.
  ProcessGroupPtr shard_group{};
  // Of the first parameter: the same on all ranks, also on one without a part.
  c10::Device device{c10::kCPU};
};

// Throws what GradientShards::gradient_shards() throws, and
// std::invalid_argument if a sharded optimizer names no group.
OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer);

// `numbers` reduced over `group`, on their device; where the group has no
// backend for that, by way of one it has. Collective; the device's type is the
// same on all ranks.
at::Tensor agreed(const at::Tensor& numbers, ReduceOp op,
                  const ProcessGroupPtr& group);

}  // namespace lockstep::detail
