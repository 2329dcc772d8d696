#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "lockstep/comm/mpi/pending.h"
#include "lockstep/comm/mpi/runtime.h"

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

// Messages do not go through the queue of collectives: they are started at once
// and make progress whenever this rank is in MPI. MPI works on a copy of the
// tensor, because it cannot take a message back, while a work that has failed
// leaves the tensor to its caller. A work fails when its wait runs out of time
// or it is aborted. Its message is then given up, and so is the message of a
// work that is dropped:
// - A send goes on, with the content that it had when it was started.
// - A receive is cancelled, so that the next one gets the message. If MPI had
//   already matched the receive with a message, that message is lost with it.
//
// `timeout` is for a wait() that is given none; the works throw
// c10::DistBackendError. Like Gloo's messages they have no future.
c10::intrusive_ptr<c10d::Work> start_send(
    std::shared_ptr<Communicator> communicator, const at::Tensor& tensor,
    int to, int tag, std::chrono::milliseconds timeout);
// `from` may be MPI_ANY_SOURCE; sourceRank() then tells the sender.
c10::intrusive_ptr<c10d::Work> start_recv(
    std::shared_ptr<Communicator> communicator, const at::Tensor& tensor,
    int from, int tag, std::chrono::milliseconds timeout);

}  // namespace lockstep::internal::mpi
