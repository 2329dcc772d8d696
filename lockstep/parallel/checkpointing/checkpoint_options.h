#pragma once

#include <stdexcept>

namespace lockstep {

// The comparison of checkpoint() between a forward and its recomputation:
// shape, dtype and device of every tensor that autograd saves (Python's
// "default"), or nothing.
enum class DeterminismCheck { metadata, none };

// The arguments of torch.utils.checkpoint.checkpoint (PyTorch documentation)
// with use_reentrant=False, and its defaults.
struct CheckpointOptions {
  // Whether the recomputation begins with the generator states of the forward,
  // so that dropout drops the same elements; the states of now are restored
  // afterwards. Set it to false if nothing in the function is random: that
  // saves a copy of 5 KiB for each call, and is required in a DataParallel with
  // several CPU replicas.
  bool preserve_rng_state{true};

  // The number of saved tensors is always compared.
  DeterminismCheck determinism_check{DeterminismCheck::metadata};

  // Whether the recomputation stops as soon as it has all tensors that backward
  // needs. An exception, which derives from std::exception, then ends the
  // function; set this to false if the function catches such exceptions or is
  // noexcept, or if it must run to its end.
  bool early_stop{true};
};

// A recomputation differs from its forward. It follows
// torch.utils.checkpoint.CheckpointError. (Files have SnapshotError.)
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lockstep
