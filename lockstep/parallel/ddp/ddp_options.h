#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// DistributedDataParallelOptions::mixed_precision; like _MixedPrecision of
// torch.nn.parallel.distributed. Without a value the dtype stays as it is.
struct MixedPrecision {
  // The dtype of floating-point parameters, and of tensors that are arguments
  // of forward, while forward and backward run. At any other time parameters
  // have their own dtype, so grad() with respect to them does not find them in
  // the graph.
  std::optional<at::ScalarType> param_dtype{};
  // The dtype of gradients in their buckets; none means param_dtype.
  std::optional<at::ScalarType> reduce_dtype{};
  // The dtype of floating-point buffers, from the constructor on.
  std::optional<at::ScalarType> buffer_dtype{};
};

// The arguments of torch.nn.parallel.DistributedDataParallel (PyTorch
// documentation), with the same defaults except gradient_as_bucket_view. They
// must be the same on every rank, which the constructor compares if init_sync
// is true. Most programs need none of them.
struct DistributedDataParallelOptions {
  // ---- Behaviour: what rank 0 gives the others, and the group ----

  // Whether every rank gets rank 0's buffers (running statistics): in the
  // constructor if init_sync is true, and at the start of each forward that
  // follows one made in grad mode outside no_sync(). Set it to false if the
  // ranks' buffers may differ, or if SyncBatchNorm keeps them equal: forward
  // then sends nothing.
  bool broadcast_buffers{true};

  // Whether forward sends buffers. If it is set, even to false, the constructor
  // sends buffers whatever broadcast_buffers is (if init_sync is true). Set it
  // to false to send buffers once only. None means that broadcast_buffers
  // decides.
  std::optional<bool> forward_sync_buffers{};

  // Whether the constructor checks that the ranks' models are alike, and gives
  // every rank the parameters of rank 0, and its buffers as the two options
  // above say. Set it to false if all ranks have loaded the same weights: that
  // saves time at the start, and a mistake goes unnoticed.
  bool init_sync{true};

  // The ranks that average their gradients. Null means the default group. Most
  // programs leave it.
  ProcessGroupPtr process_group{};

  // ---- Performance: buckets ----

  // MiB of gradients that are reduced together. A larger value moves more at
  // once; a smaller value starts earlier. Measure before you change it. None:
  // 25.
  std::optional<double> bucket_cap_mb{};

  // The same for the first bucket, whose reduction should begin early in
  // backward. Most programs leave it. None means bucket_cap_mb if that is
  // given, otherwise 1, as in Python.
  std::optional<double> first_bucket_mb{};

  // Whether .grad is a part of its bucket. Set it to false if the program keeps
  // gradients beyond the next backward: .grad then has memory of its own, which
  // costs a copy and the memory. Python's is false.
  bool gradient_as_bucket_view{true};

  // Whether ranks of one host reduce large gradients (64 KiB and more) where
  // backward computes them, which saves their copy into a bucket. Costs shared
  // memory of the size of these gradients, and replaces the process's CPU
  // allocator by one that passes on everything else. A gradient is copied as
  // before if it is not computed there, or if its memory is used by another
  // tensor, too. Only with gradient_as_bucket_view; without effect with
  // communication hooks, check_for_nan_in_grad or mixed precision, and on other
  // backends. The results are the same bit by bit.
  bool place_gradients{true};

  // ---- Behaviour: parameters that some iterations do not use ----

  // Whether a backward pass may leave parameters out, on some ranks or on all.
  // A rank whose backward leaves a parameter out adds nothing to that
  // parameter's average; a parameter that no rank used keeps the gradient that
  // it had. Set it to true if backward() reports parameters without a gradient.
  // Costs a search of the graph and a small all-reduce in each iteration.
  bool find_unused_parameters{false};

  // Promises that every iteration uses the same parameters in the same way. Set
  // it to true for nested backward passes (checkpointing) of shared parameters,
  // or for unused parameters without a search in each iteration.
  bool static_graph{false};

  // With find_unused_parameters or static_graph: parameters that no rank used
  // in the first backward are not reduced any more; a gradient for one of them
  // is an error from then on. Set it to true if large parts of the model stay
  // unused for the whole training.
  bool skip_all_reduce_unused_params{false};

  // ---- Behaviour: parameters that are treated in another way ----

  // Names from named_parameters() and named_buffers() that are neither checked,
  // nor broadcast, nor averaged. For parts that differ between ranks; buffers
  // of which set_placement() says so need not be named.
  std::vector<std::string> params_and_buffers_to_ignore{};

  // ---- Performance: precision ----

  // The dtypes of parameters, gradients and buffers while the model runs. For
  // hardware that is fast with 16-bit numbers; autocast is the more careful
  // way. None means that every tensor keeps its dtype.
  std::optional<MixedPrecision> mixed_precision{};

  // ---- Debugging (not in Python) ----

  // Looks for NaN and infinity in what each rank contributes. If there is any,
  // backward() throws std::runtime_error on every rank, with rank, parameter
  // and step. Costs a pass over the gradients and a small exchange. Set it to
  // true if the loss becomes NaN.
  bool check_for_nan_in_grad{false};

  // After every so many iterations, forward compares digests of all parameters
  // and, if replicas have drifted apart, throws std::runtime_error on every
  // rank, with rank and parameter. Set it, to 100 for example, if ranks give
  // different results. Has no effect under join(). 0 means never.
  int64_t check_replicas_every{0};
};

}  // namespace lockstep
