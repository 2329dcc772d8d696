#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <vector>

#include "lockstep/amp/layout_groups.h"
#include "lockstep/comm/collective_options.h"

// Shared by clipping and unscaling; not for users.
namespace lockstep::internal {

// The gradients that an optimizer of some parameters will use for its step on
// this rank.
struct OptimizerGradients {
  // The gradients of all parameters that have one, each once; for a sharded
  // optimizer (GradientShards) this rank's part of them. They alias the
  // gradients.
  std::vector<at::Tensor> tensors{};
  // The same without empty ones, for which some norms are not defined, and
  // without duplicates: by the share (LayoutGroups::share_of()) with which they
  // count in a sum over all ranks.
  std::map<double, std::vector<at::Tensor>> counted{};
  // The ranks that hold the other parts of a sharded optimizer's gradients;
  // null for any other optimizer.
  ProcessGroupPtr shard_group{};
  // The groups over which parameters are divided.
  LayoutGroups layouts{};
  // The device of the first parameter. It is the same on all ranks, also on a
  // rank that owns no part.
  c10::Device device{c10::kCPU};
};

// Throws what GradientShards::gradient_shards() throws, and
// std::invalid_argument if a sharded optimizer names no group.
OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer);
OptimizerGradients gradients_of(at::TensorList parameters);

// Reduces `numbers` over `group` and returns the result on their device; if the
// group has no backend for that device, the numbers travel on a device that it
// has a backend for. Collective; the type of the device must be the same on all
// ranks.
at::Tensor agreed(const at::Tensor& numbers, ReduceOp op,
                  const ProcessGroupPtr& group);

}  // namespace lockstep::internal
