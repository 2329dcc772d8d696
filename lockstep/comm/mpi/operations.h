#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/comm/mpi/pending.h"

// The collectives themselves, over contiguous tensors of the CPU. Each blocks
// until this rank's part has ended, to the deadline of `round` at most, and
// throws c10::DistBackendError. Shapes are those of c10d's methods of the same
// names; the caller checks them. Each function makes the MPI call of its own
// name.
namespace lockstep::internal::mpi {

using ReduceOp = c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

void all_reduce(Round& round, const at::Tensor& tensor, const ReduceOp& op);
// Reduces the tensors as one; they have one dtype.
void all_reduce_coalesced(Round& round, const Tensors& tensors,
                          const ReduceOp& op);
// Replaces a sparse (COO) tensor by the sum: gathers the entries of all ranks.
void all_reduce_sparse(Round& round, const at::Tensor& tensor);
void reduce(Round& round, const at::Tensor& tensor, int root,
            const ReduceOp& op);
// `inputs` may differ in size; rank i's output has that of inputs[i].
void reduce_scatter(Round& round, const at::Tensor& output,
                    const Tensors& inputs, const ReduceOp& op);
// `input` holds the ranks' parts, one after the other.
void reduce_scatter(Round& round, const at::Tensor& output,
                    const at::Tensor& input, const ReduceOp& op);

void broadcast(Round& round, const at::Tensor& tensor, int root);
void all_gather(Round& round, const at::Tensor& output,
                const at::Tensor& input);
// `outputs` may differ in size (then an all-to-all carries them).
void all_gather(Round& round, const Tensors& outputs, const at::Tensor& input);
// `outputs` and `inputs` hold one tensor for each rank on the root; they are
// ignored on the other ranks.
void gather(Round& round, const Tensors& outputs, const at::Tensor& input,
            int root);
void scatter(Round& round, const at::Tensor& output, const Tensors& inputs,
             int root);
// `receives` and `sends` count the elements from and to each rank.
void all_to_all(Round& round, const at::Tensor& output, const at::Tensor& input,
                const std::vector<int64_t>& receives,
                const std::vector<int64_t>& sends);
void barrier(Round& round);

}  // namespace lockstep::internal::mpi
