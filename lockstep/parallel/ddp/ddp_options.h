#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/mixed_precision.h"

namespace lockstep {

// The arguments of torch.nn.parallel.DistributedDataParallel (PyTorch
// documentation), with the same defaults except gradient_as_bucket_view. They
// must be the same on every rank.
struct DistributedDataParallelOptions {
  // Whether every rank gets rank 0's buffers (running statistics) in the
  // constructor (if init_sync is true) and at the start of each forward that
  // follows a synchronising one.
  bool broadcast_buffers{true};
  // Whether forward sends buffers; none: broadcast_buffers decides. If it is
  // set, even to false, the constructor sends buffers whatever
  // broadcast_buffers is (if init_sync is true).
  std::optional<bool> forward_sync_buffers{};
  // Whether the constructor checks that the ranks' models are alike, and gives
  // every rank the parameters of rank 0, and its buffers as the two options
  // above say.
  bool init_sync{true};
  ProcessGroupPtr process_group{};  // null: the default group
  // MiB of gradients that are reduced together; none: 25. A larger value moves
  // more at once, a smaller one starts earlier.
  std::optional<double> bucket_cap_mb{};
  // The same for the first bucket, whose reduction should begin early in
  // backward. None, as in Python: 1, or bucket_cap_mb if that is given.
  std::optional<double> first_bucket_mb{};
  // The same for the first, the second, ... bucket, the last for all others;
  // replaces the two options above.
  std::vector<double> bucket_cap_mb_list{};
  // Whether a backward pass may leave parameters out, on some ranks or on all.
  // Such a rank adds nothing of this backward to their averages; a parameter
  // that no rank used keeps the gradient that it had. Costs a search of the
  // graph and a small all-reduce.
  bool find_unused_parameters{false};
  // Whether .grad is a part of its bucket. False gives .grad memory of its own,
  // for code that keeps gradients beyond the next backward; that costs a copy
  // and the memory.
  bool gradient_as_bucket_view{true};
  // Promises that every iteration uses the same parameters in the same way.
  // Allows nested backward passes (checkpointing) of shared parameters, and
  // unused parameters without a search in each iteration.
  bool static_graph{false};
  // With find_unused_parameters or static_graph: parameters that no rank used
  // in the first backward are not reduced any more; a gradient for one of them
  // is an error from then on.
  bool skip_all_reduce_unused_params{false};
  // Parameters whose gradients are averaged apart from the others, all at once,
  // when the gradient of param_to_hook_all_reduce is ready; their own must be
  // complete by then. Give both options or neither. All must have one dtype and
  // device. Hooks and the check for NaN do not see these gradients; optimizers
  // in backward and sharded optimizers refuse them.
  std::vector<std::pair<std::string, at::Tensor>>
      delay_all_reduce_named_params{};
  at::Tensor param_to_hook_all_reduce{};
  // Names from named_parameters() and named_buffers() that are neither checked,
  // nor broadcast, nor averaged.
  std::vector<std::string> params_and_buffers_to_ignore{};
  std::optional<MixedPrecision> mixed_precision{};
  // Not in Python: looks for NaN and infinity in what each rank contributes. If
  // there is any, backward() throws std::runtime_error on every rank, with
  // rank, parameter and step. Costs a pass over the gradients and a small
  // exchange.
  bool check_for_nan_in_grad{false};
  // Not in Python: after every so many iterations, forward compares digests of
  // all parameters and, if replicas have drifted apart, throws
  // std::runtime_error on every rank, with rank and parameter. 0: never. Has no
  // effect under join().
  int64_t check_replicas_every{0};
};

}  // namespace lockstep
