#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <optional>
#include <vector>

#include "lockstep/comm/collective_options.h"

// Messages from one rank to another, as in torch.distributed (PyTorch
// documentation, "Distributed communication package", Point-to-point
// communication). collective_options.h says what holds for tensors, blocking
// and errors.
//
// Messages between two ranks of a group with one tag arrive in the order in
// which they were sent. The receiver's tensor has as many bytes as the
// sender's. A rank must not send to itself.
//
// Timeouts. If a send() or recv() throws because its time is over, or the
// Work::wait() of a message does, the message has failed for good: a repeated
// wait throws again. On the CPU the tensor belongs to the caller from then on:
// nothing that arrives later is written into it, and nothing that is written
// into it is sent. What a receive has written until then stays in it. The same
// holds after Work::abort() with shm and mpi, and with shm for all messages of
// the group after ProcessGroup::abort() or destroy_process_group(). What
// becomes of the message depends on the backend:
//
//           the message of a receive      the message of a send   the group
//   shm     goes to the next receive      the receive that it     goes on
//           of its tag, whole             belongs to fails, and
//                                         names the sender
//   mpi     the same; lost if MPI had     may still arrive, with  goes on
//           begun to receive it           its old content
//   gloo    lost                          lost                    is broken
//
// "lockstep" behaves as shm on one host, and as gloo between several. With NCCL
// the operation stays on the stream until NCCL's own watchdog ends it.
namespace lockstep {

// As `src` of recv() and irecv(): the rank that sends first.
inline constexpr int kAnySource = -1;

struct PointToPointOptions {
  // Null means the default group.
  ProcessGroupPtr group{};

  // The receive with the same tag gets the message; 0 to kMaxTag. Set it if
  // messages between two ranks are received in another order than they are
  // sent. NCCL has no tags.
  int tag{0};

  // How long the message may take; more than 0. None means the group's timeout.
  std::optional<std::chrono::milliseconds> timeout{};
};
inline constexpr int kMaxTag = (1 << 30) - 1;

// Blocks until `tensor` may be written again; the peer may not have the message
// yet.
void send(const at::Tensor& tensor, int dst,
          const PointToPointOptions& options = {});

// Blocks until the message is in `tensor`. Returns the rank that sent it.
int recv(const at::Tensor& tensor, int src = kAnySource,
         const PointToPointOptions& options = {});

// Do the same without blocking: `tensor` must be left alone until Work::wait()
// has returned or thrown. After wait() has returned, Work::sourceRank() of
// irecv() is the rank that sent the message. With Gloo there is no polling:
// isCompleted() says nothing before wait(). If a Work is dropped without a
// wait, then with shm its message stays under way and its tensor in use, with
// MPI a receive is cancelled, and with Gloo the Work must be kept instead.
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
  ProcessGroupPtr group{};  // none means the default group; the same in all
  int tag{0};
  std::optional<std::chrono::milliseconds> timeout{};  // not in Python
};

// Starts all operations, in any order of sends and receives, without a deadlock
// between ranks that do so. Returns one Work for each operation, in the same
// order. The list must not be empty. If an operation cannot be started, those
// before it are aborted.
std::vector<WorkPtr> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list);

}  // namespace lockstep
