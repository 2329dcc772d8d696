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
// has returned. After that, Work::sourceRank() of irecv() is the rank it came
// from. With Gloo there is no polling and no second try: isCompleted() says
// nothing before wait(), and a wait that times out closes the group's
// connections.
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
// list is not empty.
std::vector<WorkPtr> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list);

}  // namespace lockstep
