#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/mpi/runtime.h"

namespace lockstep::mpi {

// Messages stand beside the queue of collectives: they are started at once and
// go on whenever this rank is in MPI. MPI works on a copy of the tensor,
// because it cannot take a message back, while a work that has failed leaves
// the tensor to its caller. A work fails when its wait runs out of time or it
// is aborted; its message is given up then, as that of a work that is dropped
// is:
// - A send goes on, with the content that it had when it was started.
// - A receive is cancelled, so that the next one gets the message. One that MPI
//   had matched with a message already takes that message along.
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
