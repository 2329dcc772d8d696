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

// After the arguments of torch.nn.parallel.DistributedDataParallel (PyTorch
// documentation), with their defaults but for gradient_as_bucket_view. The
// same on every rank.
struct DistributedDataParallelOptions {
  // Whether the constructor, and each forward after one that synchronised,
  // begins with rank 0's buffers (running statistics) on every rank.
  bool broadcast_buffers{true};
  // Whether forward does so; none: as broadcast_buffers says. If it is given,
  // the constructor sends buffers in any case.
  std::optional<bool> forward_sync_buffers{};
  // Whether the constructor checks that the ranks' models are alike and gives
  // every rank rank 0's parameters and buffers.
  bool init_sync{true};
  ProcessGroupPtr process_group{};  // none: the default group
  // MiB of gradients that are reduced together; none: 25. Larger moves more at
  // once, smaller starts earlier.
  std::optional<double> bucket_cap_mb{};
  // The same of the first bucket, whose reduction is to begin early in
  // backward. None, as in Python: 1, or bucket_cap_mb where that is given.
  std::optional<double> first_bucket_mb{};
  // The same of the first, the second, ... bucket, the last for all others;
  // instead of the two above.
  std::vector<double> bucket_cap_mb_list{};
  // Whether a backward pass may leave parameters out, on some ranks or on all:
  // the others average without theirs, and what no rank used keeps the
  // gradient it had. Costs a look at the graph and a small all-reduce.
  bool find_unused_parameters{false};
  // Whether .grad is a part of its bucket; false keeps it apart, for code that
  // holds gradients beyond the next backward, and costs a copy and the memory.
  bool gradient_as_bucket_view{true};
  // The same parameters are used in the same way in every iteration. Allows
  // nested backward passes (checkpointing) of shared parameters, and unused
  // ones without looking for them each time.
  bool static_graph{false};
  // With find_unused_parameters or static_graph: what no rank used in the
  // first backward is not reduced any more; a gradient of it is an error then.
  bool skip_all_reduce_unused_params{false};
  // Parameters whose gradients are averaged by themselves, all at once, when
  // that of param_to_hook_all_reduce is ready; both or none. Theirs must be
  // complete by then. All of one dtype and device. Hooks, the check for NaN and
  // optimizers in backward do not see them, and sharded optimizers refuse them.
  std::vector<std::pair<std::string, at::Tensor>>
      delay_all_reduce_named_params{};
  at::Tensor param_to_hook_all_reduce{};
  // Names as named_parameters() and named_buffers() give them: neither
  // checked, nor broadcast, nor averaged.
  std::vector<std::string> params_and_buffers_to_ignore{};
  std::optional<MixedPrecision> mixed_precision{};
  // Not in Python: look for NaN and infinity in what each rank contributes; if
  // there is any, backward() throws std::runtime_error on every rank that names
  // rank, parameter and step. Costs a pass over the gradients and a small
  // exchange.
  bool check_for_nan_in_grad{false};
  // Not in Python: every so many iterations, forward compares digests of all
  // parameters and throws std::runtime_error on every rank, naming
  // rank and parameter, if replicas have drifted apart. 0: never. Not under
  // join().
  int64_t check_replicas_every{0};
};

}  // namespace lockstep
