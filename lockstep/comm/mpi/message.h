#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/mpi/runtime.h"

namespace lockstep::mpi {

// Messages stand beside the queue of collectives: they are started at once and
// go on whenever this rank is in MPI. A wait that runs out of time may be
// repeated. A send that is dropped before its message has ended goes on, with
// the tensor. A receive that is dropped is cancelled, so that it does not take
// the message of a later one; a message that has begun to come still goes to
// its tensor.
//
// `timeout` is for a wait() that is given none; the works throw
// c10::DistBackendError. They have no future, as Gloo's.
c10::intrusive_ptr<c10d::Work> start_send(
    std::shared_ptr<Communicator> communicator, const at::Tensor& tensor,
    int to, int tag, std::chrono::milliseconds timeout);
// `from` may be MPI_ANY_SOURCE; sourceRank() tells.
c10::intrusive_ptr<c10d::Work> start_recv(
    std::shared_ptr<Communicator> communicator, const at::Tensor& tensor,
    int from, int tag, std::chrono::milliseconds timeout);

}  // namespace lockstep::mpi
