#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <map>
#include <vector>

#include "lockstep/comm/collective_options.h"

// Shared by clipping and unscaling; not for users.
namespace lockstep::internal {

// The groups over which the layouts of some parameters (tensor_layout.h) divide
// them, and reductions over all of these groups: so that every rank gets what
// one process with the whole parameters would get.
//
// Ranks may have different groups: two stages of a pipeline may divide their
// parameters in different ways. Each rank reduces over each of its groups, of
// which all members must do so: every rank of a group must call with a
// parameter whose layout names the group, with or without a gradient. A
// reduction over a group waits until the groups that come after it in a layout
// are done, on each of its ranks, because these divide what it adds up. A rank
// knows only its own groups, so the ranks go through all their groups that are
// not done again and again, in the order of the groups' names, which is the
// same everywhere; with the numbers each rank says whether it still waits for
// another group. So no two ranks ever wait for each other in different groups.
class LayoutGroups {
 public:
  LayoutGroups() = default;
  explicit LayoutGroups(at::TensorList parameters);

  // Whether a parameter has a layout.
  bool any() const { return any_; }

  // Returns what this rank contributes of a parameter's number to a sum over
  // all ranks: ranks that a group of other parameters connects, but none of
  // this one's, have the same elements, so each of them gives an equal share. 0
  // for a duplicate, which another parameter counts for.
  double share_of(const at::Tensor& parameter) const;

  // Reduces `numbers` (floating point, one dimension, without NaN unless `op`
  // is SUM) over all groups, and returns the result on their device. `op` is
  // SUM or MAX. Collective over the groups; the type of the device must be the
  // same on all ranks. Waits for the device. The result is the same bits on all
  // ranks that a group connects. Throws std::invalid_argument, on these ranks,
  // if their layouts list groups in orders that contradict each other.
  at::Tensor reduced(const at::Tensor& numbers, const ReduceOp& op) const;

 private:
  struct Entry {
    ProcessGroupPtr group;
    // Those that must be reduced before this one.
    std::vector<const ProcessGroup*> inner;
  };

  bool any_ = false;
  std::vector<Entry> entries_;  // by name
};

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

// Groups tensors for foreach operations, which take those of one device and
// dtype at once. Groups and tensors stay in the order of `tensors`.
std::vector<std::vector<at::Tensor>> by_device_and_dtype(
    const std::vector<at::Tensor>& tensors);

// Reduces `numbers` over `group` and returns the result on their device; if the
// group has no backend for that device, the numbers travel on a device that it
// has a backend for. Collective; the type of the device must be the same on all
// ranks.
at::Tensor agreed(const at::Tensor& numbers, ReduceOp op,
                  const ProcessGroupPtr& group);

}  // namespace lockstep::internal
