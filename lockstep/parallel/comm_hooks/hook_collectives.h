#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/comm_hook.h"

// Communication for the hooks of this folder. Internal to comm_hooks.
//
// Between ranks that share memory an operation runs at once, in the thread that
// computes gradients: an asynchronous operation would need a thread of its own,
// and if each core has a rank, that thread would take the core from backward.
// In other groups the operation runs while backward goes on.
//
// `then` runs after the operation and returns the future's value. In groups
// that do not share memory it may run in a thread of the backend, which it must
// not keep waiting. So it must not start collectives; their order would not be
// the same on all ranks, either.
namespace lockstep::internal {

using ExchangeEnd = std::function<at::Tensor()>;

// Sums `tensor` over the ranks in place.
CommFuture all_reduce_then(const at::Tensor& tensor,
                           const ProcessGroupPtr& group, ExchangeEnd then);
// Gathers each rank's [n] into `output`, [world_size, n].
CommFuture all_gather_then(const at::Tensor& output, const at::Tensor& input,
                           const ProcessGroupPtr& group, ExchangeEnd then);

// Averages `tensor` in place; the future's value is `tensor`. It divides before
// it sums, so that 16-bit dtypes do not overflow in the sum.
CommFuture average(const at::Tensor& tensor, const ProcessGroupPtr& group);

// Returns a future with the value of `future`. `done` runs before it completes,
// where `then` does, unless `future` has failed: hooks count steps there, so
// that ranks which lose a step in different buckets count alike.
CommFuture after_success(const CommFuture& future, std::function<void()> done);

// Throws std::invalid_argument if the bucket's gradients are complex, for hooks
// that compress real numbers only. `hook`: the name of its function. Internal
// to comm_hooks.
void require_real(const GradBucket& bucket, const char* hook);

}  // namespace lockstep::internal
