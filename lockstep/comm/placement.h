#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <variant>

#include "lockstep/comm/process_group.h"

// How the ranks of a group share a parameter, for layers of one's own that are
// divided. Python says it by the placements of a DTensor (PyTorch
// documentation, torch.distributed.tensor).
namespace lockstep {

// Every rank has the whole tensor, with equal values: what a parameter is of
// which nothing was said.
struct Replicate {};

// Each rank has a part: some indices of dimension `dim`, in the order of ranks.
struct Shard {
  // A negative one counts from the last dimension.
  int64_t dim{0};

  // The size of dimension `dim` of the whole tensor; give it if the ranks
  // cannot have equal parts. They then have the parts of torch::chunk(), as
  // scatter_to_tensor_group() gives them. None means the size of this rank's
  // part, as often as there are ranks.
  std::optional<int64_t> size{};
};

// Each rank has a tensor of its own, as if there were one expert of a mixture
// on each rank. In a snapshot the tensor needs a name that the other ranks' do
// not have, so name modules by their number in the whole model ("expert3").
struct Own {};

using Placement = std::variant<Replicate, Shard, Own>;

// Says how the ranks of `group` (null means the default group) share `tensor`,
// a parameter or buffer, in place of what was said before. Without this all
// ranks are taken to have the same tensor: clip_grad_norm_() would give each
// rank the norm of its own part, and a snapshot would hold the part of one
// rank. With it they, GradScaler, snapshots, full_state_dict() and
// verify_replicated() work as for the layers of tensor parallelism: on the
// whole model. What takes its tensors for replicas (DistributedDataParallel,
// FullyShard, ZeroRedundancyOptimizer, model averagers, JoinedOptimizer)
// refuses parameters of which the ranks of its group have parts, and leaves
// such buffers alone.
//
//   struct Experts : torch::nn::Module {
//     explicit Experts(int rank)
//         : mine(register_module("expert" + std::to_string(rank), Expert())) {
//       for (auto& tensor : mine->parameters()) set_placement(tensor, Own{});
//     }
//     Expert mine;
//   };
//
// Every rank of the group must have a parameter that is divided over it, as
// norms are added up over the group. Call it before the tensor is given to
// FullyShard or a Pipeline, which divide it further. What is said belongs to
// the tensor object: it stays when its data is replaced (Module::to()), but
// clones and views have none. In a group of one, or without process groups, it
// does nothing. Any thread may call; nothing is communicated.
//
// Throws std::invalid_argument if there is no such dimension, if this rank's
// part does not have the size that torch::chunk() gives it, or if FullyShard or
// a Pipeline has the tensor already.
void set_placement(const at::Tensor& tensor, const Placement& placement,
                   const ProcessGroupPtr& group = {});

}  // namespace lockstep
