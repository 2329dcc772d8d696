#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// While it exists, LibTorch's default generators give each rank of a tensor
// group other random numbers: that of the CPU and, if the group has a backend
// for GPUs, that of the current one. What is divided over the ranks needs this:
// dropout of attention heads, of hidden features, or of parts of the sequence.
// Outside, the ranks draw equal numbers, as dropout of replicated activations
// needs it: then each rank has the same mask.
//
//   // This rank's part of the features.
//   at::Tensor hidden = up->forward(x);
//   {
//     lockstep::TensorParallelRandom random(group);
//     hidden = at::dropout(hidden, 0.1, is_training());
//   }
//   x = x + at::dropout(down->forward(hidden), 0.1, is_training());
//
// This needs the same state of the generators on all ranks of the group before,
// so give them the same torch::manual_seed(). (Ranks of a data group draw other
// numbers: seed with the rank in the data group.) The constructor draws one
// number from the CPU's generator and seeds the generators with that number and
// the rank; the destructor restores the states that they had after the
// constructor's draw. So everything follows from the generators' own states:
// activation checkpointing that restores them repeats the same masks, and so
// does a snapshot. Megatron-LM and DTensor keep a second state instead
// (get_cuda_rng_tracker, torch.distributed.tensor._random).
//
// One draw and two copies of the generators' states (5 KB), no communication.
// In a group of one, or without process groups, it does nothing. May be nested.
// No other thread may use the default generators meanwhile.
class TensorParallelRandom {
 public:
  // Null means the default group.
  explicit TensorParallelRandom(const ProcessGroupPtr& group = {});
  ~TensorParallelRandom();
  TensorParallelRandom(const TensorParallelRandom&) = delete;
  TensorParallelRandom& operator=(const TensorParallelRandom&) = delete;

 private:
  // The states to go on with.
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

}  // namespace lockstep
