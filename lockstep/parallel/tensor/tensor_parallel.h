#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/tensor/parallel_linear.h"
#include "lockstep/parallel/tensor/parallel_self_attention.h"
#include "lockstep/parallel/tensor/sequence_parallel_norm.h"
#include "lockstep/parallel/tensor/tensor_collectives.h"
#include "lockstep/parallel/tensor/vocab_parallel_cross_entropy.h"
#include "lockstep/parallel/tensor/vocab_parallel_embedding.h"

// All of tensor parallelism; docs/tensor-parallel.md explains it.
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

// Checks what tensor parallelism takes for granted: that all ranks of `group`
// (null means the default group) have the same bits in each parameter and
// buffer of `module` that is not divided over ranks (biases of row-parallel
// layers, norms, position embeddings), and equal states of LibTorch's default
// generators, of the CPU and of the devices of `module`. Call it after
// constructing the model, and again if the ranks of a tensor group seem to
// drift apart: ranks with different values train without an error, but wrongly.
//
// Collective: one all_gather of 16 bytes; reads all tensors.
// Throws std::runtime_error, on every rank, with the rank and what differs.
// Nothing is changed. In a group of one, or without process groups, it does
// nothing.
void verify_replicated(const torch::nn::Module& module,
                       const ProcessGroupPtr& group = {});

}  // namespace lockstep
