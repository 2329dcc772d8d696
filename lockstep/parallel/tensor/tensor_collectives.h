#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "lockstep/comm/process_group.h"

// Collectives that autograd differentiates, for models whose layers are divided
// over the ranks of a tensor group. ColumnParallelLinear and the other layers
// are made of them; call them for layers of your own. They follow Megatron-LM
// (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
// Models Using Model Parallelism", section 3; its f and g are the first two
// functions) and Korthikanti et al., "Reducing Activation Recomputation in
// Large Transformer Models", section 4.2.2 (the last two).
//
// A tensor is either equal on all ranks of the group (replicated), or a part,
// or a term of a sum. A replicated tensor has a replicated gradient: every rank
// computes the same loss and calls backward() for it, and nothing is counted
// twice. The functions say which of these they take and return:
//
//   function                    takes           returns         backward
//   copy_to_tensor_group        replicated      replicated [1]  sums
//   reduce_from_tensor_group    a term          replicated      copies
//   gather_from_tensor_group    a part          replicated      divides
//   scatter_to_tensor_group     replicated      a part          gathers
//   all_gather_sequence         a part          replicated [1]  sums, divides
//   reduce_scatter_sequence     a term          a part          gathers
//
// [1] This copy is for computing with the rank's own part of the weights, so
//     its gradient is a term of the sum.
//
// Every rank of the group calls the same function with tensors of the same
// shape (parts of unequal size: see the functions) and dtype, and runs the same
// backward passes. Each call is one collective in forward, or none (copy,
// scatter), and one in backward if the input requires grad, or none (reduce,
// gather). Sums are in the tensor's dtype, as all_reduce() makes them. `group`
// is the tensor group; null means the default group. In a group of one rank, or
// without process groups, they return `input`.
//
// Second derivatives (create_graph) are right: the backward of each function is
// another of them.
namespace lockstep {

// Returns `input`; in backward the ranks' gradients are added up. It goes
// before layers that divide the output features, and around a replicated
// parameter that is used on a part of the sequence. Megatron-LM's f.
at::Tensor copy_to_tensor_group(const at::Tensor& input,
                                const ProcessGroupPtr& group = {});

// Returns the sum of all ranks' `input`; backward passes the gradient on. It
// goes after layers that divide the input features. Megatron-LM's g.
at::Tensor reduce_from_tensor_group(const at::Tensor& input,
                                    const ProcessGroupPtr& group = {});

// Returns the parts of all ranks, concatenated in dimension `dim`. `size` is
// what that dimension has in the result; give it if the ranks cannot have equal
// parts of it: they then have the parts that scatter_to_tensor_group() gives.
at::Tensor gather_from_tensor_group(const at::Tensor& input, int64_t dim,
                                    const ProcessGroupPtr& group = {},
                                    std::optional<int64_t> size = {});

// Returns this rank's part of dimension `dim`, as torch.chunk() divides it: the
// last ranks may have less than the others, or nothing.
at::Tensor scatter_to_tensor_group(const at::Tensor& input, int64_t dim,
                                   const ProcessGroupPtr& group = {});

// Returns the parts of all ranks, which have equal sizes, concatenated in
// dimension `dim`. It goes before layers that divide the output features, if
// their input is divided by the sequence.
at::Tensor all_gather_sequence(const at::Tensor& input, int64_t dim,
                               const ProcessGroupPtr& group = {});

// Returns this rank's part in dimension `dim` of the sum of all ranks' `input`.
// It goes after layers that divide the input features, if their output is to be
// divided by the sequence. Throws std::invalid_argument if the ranks cannot
// have equal parts.
at::Tensor reduce_scatter_sequence(const at::Tensor& input, int64_t dim,
                                   const ProcessGroupPtr& group = {});

}  // namespace lockstep
