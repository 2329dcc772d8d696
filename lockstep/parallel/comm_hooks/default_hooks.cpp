#include "lockstep/parallel/comm_hooks/default_hooks.h"

#include <ATen/ATen.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/comm_hooks/hook_collectives.h"
#include "lockstep/parallel/comm_hooks/real_gradients.h"

namespace lockstep {
namespace {

CommHook compress_hook(const char* name, ProcessGroupPtr given,
                       at::ScalarType dtype) {
  return [name, group = internal::group_or_default(std::move(given)),
          dtype](GradBucket& bucket) {
    internal::require_real(bucket, name);
    at::NoGradGuard no_grad;
    const auto& buffer = bucket.buffer();
    // Rounds in Python's order. Copies even if the dtype is the same.
    auto compressed = buffer.to(dtype, /*non_blocking=*/false, /*copy=*/true)
                          .div_(group->size());
    return internal::all_reduce_then(compressed, group, [buffer, compressed] {
      return buffer.copy_(compressed);
    });
  };
}

CommHook compress_wrapper(const char* name, CommHook hook,
                          at::ScalarType dtype) {
  if (!hook) {
    throw std::invalid_argument(
        "a compression wrapper was given no hook; give the hook that it must "
        "wrap, such as allreduce_hook()");
  }
  return [name, hook = std::move(hook), dtype](GradBucket& bucket) {
    internal::require_real(bucket, name);
    at::NoGradGuard no_grad;
    const auto& buffer = bucket.buffer();
    // The copy lives as long as the wrapped hook may use it.
    auto inner = std::make_shared<GradBucket>(bucket);
    inner->set_buffer(buffer.to(dtype));
    auto future = hook(*inner);
    if (!future) return future;
    return future->then(
        [buffer, inner](c10::ivalue::Future& ended) -> c10::IValue {
          at::NoGradGuard in_this_thread;
          auto self =
              c10::intrusive_ptr<c10::ivalue::Future>::reclaim_copy(&ended);
          return buffer.copy_(wait_for_tensor(self).view_as(buffer));
        },
        c10::TensorType::get());
  };
}

}  // namespace

CommHook allreduce_hook(ProcessGroupPtr given) {
  return [group = internal::group_or_default(std::move(given))](
             GradBucket& bucket) {
    at::NoGradGuard no_grad;
    return internal::average(bucket.buffer(), group);
  };
}

CommHook fp16_compress_hook(ProcessGroupPtr group) {
  return compress_hook("fp16_compress_hook", std::move(group), at::kHalf);
}

CommHook bf16_compress_hook(ProcessGroupPtr group) {
  return compress_hook("bf16_compress_hook", std::move(group), at::kBFloat16);
}

CommHook fp16_compress_wrapper(CommHook hook) {
  return compress_wrapper("fp16_compress_wrapper", std::move(hook), at::kHalf);
}

CommHook bf16_compress_wrapper(CommHook hook) {
  return compress_wrapper("bf16_compress_wrapper", std::move(hook),
                          at::kBFloat16);
}

CommHook noop_hook() {
  return [](GradBucket& bucket) { return completed_future(bucket.buffer()); };
}

}  // namespace lockstep
