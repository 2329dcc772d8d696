#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/comm/mpi/round.h"

// The collectives themselves, over contiguous tensors of the CPU. Each blocks
// until this rank's part has ended, to the round's deadline at most, and throws
// c10::DistBackendError. Shapes are those of c10d's methods of the same names;
// they are checked by who calls. The MPI call behind each is that of its name.
namespace lockstep::mpi {

using ReduceOp = c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

void all_reduce(Round& round, const at::Tensor& tensor, const ReduceOp& op);
// As one tensor; all of one dtype.
void all_reduce_coalesced(Round& round, const Tensors& tensors,
                          const ReduceOp& op);
// A sparse (COO) tensor becomes the sum: entries of all ranks by all-gather.
void all_reduce_sparse(Round& round, const at::Tensor& tensor);
void reduce(Round& round, const at::Tensor& tensor, int root,
            const ReduceOp& op);
// `inputs` may differ in size; rank i's output has that of inputs[i].
void reduce_scatter(Round& round, const at::Tensor& output,
                    const Tensors& inputs, const ReduceOp& op);
// `input`: the ranks' parts one behind the other.
void reduce_scatter(Round& round, const at::Tensor& output,
                    const at::Tensor& input, const ReduceOp& op);

void broadcast(Round& round, const at::Tensor& tensor, int root);
void all_gather(Round& round, const at::Tensor& output,
                const at::Tensor& input);
// `outputs` may differ in size (then an all-to-all carries them).
void all_gather(Round& round, const Tensors& outputs, const at::Tensor& input);
// `outputs` and `inputs`: one a rank on the root, else ignored.
void gather(Round& round, const Tensors& outputs, const at::Tensor& input,
            int root);
void scatter(Round& round, const at::Tensor& output, const Tensors& inputs,
             int root);
// Element counts to and from each rank.
void all_to_all(Round& round, const at::Tensor& output, const at::Tensor& input,
                const std::vector<int64_t>& receives,
                const std::vector<int64_t>& sends);
void barrier(Round& round);

}  // namespace lockstep::mpi
