#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// How the hooks of this folder communicate. Internal to comm_hooks.
//
// Between ranks that share memory an operation is done at once, in the thread
// that computes gradients: an asynchronous one would need a thread of its own,
// and where each core has a rank that thread takes the core from backward. In
// other groups it is under way while backward goes on.
//
// `then` comes behind the operation and returns the future's value. In groups
// that do not share memory it may run in a thread of the backend, which it must
// not keep waiting: it starts no collectives. Their order would not be the same
// on all ranks, either.
namespace lockstep {

using ExchangeEnd = std::function<at::Tensor()>;

// The group that a hook was given, or the default group.
ProcessGroupPtr or_default(ProcessGroupPtr group);

// Sums `tensor` over the ranks in place.
CommFuture all_reduce_then(const at::Tensor& tensor,
                           const ProcessGroupPtr& group, ExchangeEnd then);
// [n] of each rank into `output`, [world_size, n].
CommFuture all_gather_then(const at::Tensor& output, const at::Tensor& input,
                           const ProcessGroupPtr& group, ExchangeEnd then);

// The mean of `tensor`, in place, and the future's value. Divided first, so
// that half types do not overflow in the sum.
CommFuture average(const at::Tensor& tensor, const ProcessGroupPtr& group);

}  // namespace lockstep
