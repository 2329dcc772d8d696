#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/collective_options.h"

// From one rank to another, after torch.distributed (PyTorch documentation,
// "Distributed communication package", Point-to-point communication).
// collective_options.h says what holds for tensors, blocking and errors.
//
// Messages between two ranks of a group with one tag arrive in the order in
// which they were sent. The receiver's tensor has as many bytes as the
// sender's. No rank sends to itself.
//
// Timeouts. A send() or recv() that throws because its time is over, and a
// message whose Work::wait() does, has failed for good: a wait that is repeated
// throws again. The tensor is the caller's from then on, on the CPU: nothing
// that comes later is written into it, and nothing that is written into it is
// sent. What a receive has written until then stays in it. The same holds after
// Work::abort() with shm and mpi, and with shm for all messages of the group
// after ProcessGroup::abort() or destroy_process_group(). What becomes of the
// message depends on the backend:
//
//           the message of a receive      the message of a send   the group
//   shm     goes to the next receive      the receive that it     goes on
//           of its tag, whole             belongs to fails, and
//                                         names the sender
//   mpi     the same; lost if MPI had     may still arrive, with  goes on
//           begun to receive it           its content of then
//   gloo    lost                          lost                    is broken
//
// "lockstep" is as shm on one host, and as gloo between several. With NCCL the
// operation stays on the stream: its own watchdog ends it.
namespace lockstep {

// As `src` of recv() and irecv(): whoever sends first.
inline constexpr int kAnySource = -1;

struct PointToPointOptions {
  ProcessGroupPtr group{};  // none: the default group
  int tag{0};               // 0 to kMaxTag; Gloo tells messages apart by it
  std::chrono::milliseconds timeout{0};  // zero: the group's
};
inline constexpr int kMaxTag = (1 << 30) - 1;

// Blocks until `tensor` may be written again; the peer may not have it yet.
void send(const at::Tensor& tensor, int dst,
          const PointToPointOptions& options = {});

// Blocks until `tensor` is there. Returns the rank it came from.
int recv(const at::Tensor& tensor, int src = kAnySource,
         const PointToPointOptions& options = {});

// The same without blocking: `tensor` must be left alone until Work::wait()
// has returned or thrown. After it has returned, Work::sourceRank() of irecv()
// is the rank it came from. With Gloo there is no polling: isCompleted() says
// nothing before wait(). A work that is dropped without a wait leaves its
// message under way, and the tensor in use, with shm; with MPI a receive is
// cancelled; with Gloo keep the work.
WorkPtr isend(const at::Tensor& tensor, int dst,
              const PointToPointOptions& options = {});
WorkPtr irecv(const at::Tensor& tensor, int src = kAnySource,
              const PointToPointOptions& options = {});

// One operation for batch_isend_irecv().
struct P2POp {
  enum class Kind { isend, irecv };
  Kind op;
  at::Tensor tensor;
  int peer;                 // of the default group; not kAnySource
  ProcessGroupPtr group{};  // none: the default group; the same in all
  int tag{0};
};

// Starts all of them, in any order of sends and receives, without a deadlock
// between ranks that do so. Returns one Work an operation, in their order. The
// list is not empty. If one cannot be started, those before it are aborted.
std::vector<WorkPtr> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list);

}  // namespace lockstep
