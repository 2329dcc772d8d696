#pragma once

#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstdint>
#include <optional>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Like MixedPrecisionPolicy of torch.distributed.fsdp. Without a value the
// dtype stays as it is. Shards, and with them the optimizer, always keep the
// parameters' own dtype.
struct MixedPrecisionPolicy {
  // The dtype of floating-point parameters while forward and backward run, and
  // in which they are gathered.
  std::optional<at::ScalarType> param_dtype{};
  // The dtype in which gradients are reduced, and accumulated under no_sync();
  // none means param_dtype.
  std::optional<at::ScalarType> reduce_dtype{};
  // The dtype of the floating-point tensors that forward returns.
  std::optional<at::ScalarType> output_dtype{};
  // Whether floating-point tensors among the arguments of forward are cast to
  // param_dtype.
  bool cast_forward_inputs{true};
};

// Decides about the full parameters after forward: true, false, or a number
// of ranks, as the argument of Python's fully_shard. FullyShardOptions says
// what these mean.
class ReshardAfterForward {
 public:
  template <std::integral T>
  constexpr ReshardAfterForward(T value) {
    if constexpr (!std::same_as<T, bool>) {
      ranks_ = static_cast<int64_t>(value);
    } else if (!value) {
      ranks_ = 1;
    }
  }

  // The number of ranks over which parameters stay divided; none means all
  // ranks of the group (true). false is 1.
  constexpr std::optional<int64_t> ranks() const { return ranks_; }

 private:
  std::optional<int64_t> ranks_{};
};

// The arguments of torch.distributed.fsdp.fully_shard (PyTorch documentation),
// with the same defaults. They must be the same on every rank; otherwise the
// constructor throws std::invalid_argument on all ranks.
struct FullyShardOptions {
  // ---- Behaviour: groups ----

  // The ranks over which parameters are divided. Null means the default group.
  // The same for all units of a model.
  ProcessGroupPtr group{};

  // Hybrid sharding: the ranks that have the same part of the parameters as
  // this one, each in another group of ranks that divide them. Gradients are
  // averaged over both. Typically `group` has the ranks of one host and
  // `replicate_group` the ranks in the same position on every host. (In Python
  // a mesh of two dimensions.) Null means that the parameters exist once.
  ProcessGroupPtr replicate_group{};

  // ---- Performance: memory ----

  // Whether the full parameters are freed after forward and gathered again
  // before backward (ZeRO-3), or stay until backward (ZeRO-2). Set it to false
  // if memory suffices: that saves half of the gathers.
  //
  // Or a number N of ranks, a divisor of the group's size, for something
  // between the two: after forward each rank keeps 1/N of the full parameters,
  // and in backward they are gathered from N neighbouring ranks only: k * N to
  // (k + 1) * N - 1 of `group`. Set it to the number of ranks on a host if the
  // group extends over several; then backward gathers inside the hosts. 1 is
  // false, and the group's size is true. After a forward without grad, which no
  // backward follows, N is true. The groups of neighbours are made in the first
  // forward, in a job that heals (HealedTraining) by the constructor, and live
  // as long as the default group.
  //
  // Has no effect if the ranks share one copy (shared_memory), or `group` has
  // one rank, which takes any N. None means true, except for the outermost
  // unit, whose parameters backward needs at once.
  std::optional<ReshardAfterForward> reshard_after_forward{};

  // Whether ranks of one host use one copy of the full parameters, in memory
  // that they share: nothing is gathered then. Without effect if the ranks are
  // on several hosts or the group's backend has no such memory. Most programs
  // leave it. Not in Python.
  bool shared_memory{true};

  // ---- Behaviour: precision ----

  MixedPrecisionPolicy mp_policy{};

  // ---- Behaviour: the first values ----

  // Whether every rank gets the parameters and buffers of rank 0 (of both
  // groups), as in DistributedDataParallel. Otherwise each rank keeps its part
  // of what it has itself: all ranks must have drawn the same random numbers,
  // or have loaded the same file, and values that differ are
  // std::invalid_argument, but for buffers of which set_placement() says that
  // each rank has its own. Set it to false to save that communication. Not in
  // Python.
  bool init_sync{true};
};

}  // namespace lockstep
