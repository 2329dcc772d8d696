#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/mpi/runtime.h"

namespace lockstep::internal::mpi {

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
