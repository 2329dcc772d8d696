#include "lockstep/parallel/comm_hooks/hook_collectives.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <stdexcept>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/init.h"

namespace lockstep::internal {
namespace {

// `start` starts the operation; its argument says whether asynchronously.
template <typename Start>
CommFuture exchange(const at::Tensor& tensor, const ProcessGroupPtr& group,
                    const Start& start, ExchangeEnd then) {
  const bool at_once = tensor.is_cpu() && host_sharing(group) != nullptr;
  auto work = start(!at_once);
  if (!work) return completed_future(then());
  CommFuture done;
  try {
    done = work->getFuture();
  } catch (const c10::Error&) {  // a backend without futures
    work->wait();
    return completed_future(then());
  }
  return done->then(
      [then = std::move(then)](c10::ivalue::Future& ended) -> c10::IValue {
        if (ended.hasError()) std::rethrow_exception(ended.exception_ptr());
        at::NoGradGuard no_grad;  // grad mode belongs to the thread
        return then();
      },
      c10::TensorType::get());
}

}  // namespace

CommFuture all_reduce_then(const at::Tensor& tensor,
                           const ProcessGroupPtr& group, ExchangeEnd then) {
  return exchange(
      tensor, group,
      [&](bool async_op) {
        return all_reduce(tensor, {.group = group, .async_op = async_op});
      },
      std::move(then));
}

CommFuture all_gather_then(const at::Tensor& output, const at::Tensor& input,
                           const ProcessGroupPtr& group, ExchangeEnd then) {
  return exchange(
      input, group,
      [&](bool async_op) {
        return all_gather_into_tensor(output, input,
                                      {.group = group, .async_op = async_op});
      },
      std::move(then));
}

CommFuture average(const at::Tensor& tensor, const ProcessGroupPtr& group) {
  tensor.div_(group->size());
  return all_reduce_then(tensor, group, [tensor] { return tensor; });
}

CommFuture after_success(const CommFuture& future, std::function<void()> done) {
  return future->then(
      [done = std::move(done)](c10::ivalue::Future& ended) -> c10::IValue {
        if (ended.hasError()) std::rethrow_exception(ended.exception_ptr());
        done();
        return ended.value();
      },
      future->elementType());
}

void require_real(const GradBucket& bucket, const char* hook) {
  const auto dtype = bucket.buffer().scalar_type();
  if (!c10::isComplexType(dtype)) return;
  throw std::invalid_argument(c10::str(
      hook, ": the gradients of a bucket are ", dtype,
      ", and the hook compresses real numbers only; with complex parameters "
      "use allreduce_hook, or no hook"));
}

}  // namespace lockstep::internal
