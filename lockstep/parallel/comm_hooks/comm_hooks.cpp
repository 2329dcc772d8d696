#include "lockstep/parallel/comm_hooks/comm_hooks.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/comm_hooks/hook_collectives.h"

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

constexpr int64_t kHeader = 2 * sizeof(float);  // per channel: scale, zero
constexpr double kLevels = 255;

// One rank's bytes on the wire: the scales of all channels, float32; their zero
// points, float32; one byte for each element.
struct Message {
  at::Tensor scales;  // [channels, 1]; a copy, as `all` may be unaligned
  at::Tensor zeros;   // [channels, 1]; a copy, too
  at::Tensor bytes;   // [elements], a view

  Message(const at::Tensor& all, int64_t channels) {
    auto header = all.narrow(0, 0, channels * kHeader).clone().view(at::kFloat);
    scales = header.narrow(0, 0, channels).unsqueeze(1);
    zeros = header.narrow(0, channels, channels).unsqueeze(1);
    bytes = all.narrow(0, channels * kHeader, all.numel() - channels * kHeader);
  }
};

// Returns [elements] as [channels, width], filled up with zeros.
at::Tensor in_channels(const at::Tensor& flat, int64_t channels,
                       int64_t width) {
  const auto missing = channels * width - flat.numel();
  if (missing == 0) return flat.view({channels, width});
  return at::constant_pad_nd(flat, {0, missing}).view({channels, width});
}

at::Tensor quantize(const at::Tensor& gradients, int64_t channels,
                    int64_t width) {
  auto values = in_channels(gradients.to(at::kFloat), channels, width);
  auto [lowest, highest] = at::aminmax(values, 1, /*keepdim=*/true);
  lowest.clamp_max_(0);
  highest.clamp_min_(0);
  auto scales = highest.sub_(lowest).div_(kLevels);
  scales.clamp_min_(std::numeric_limits<float>::epsilon());
  auto zeros = lowest.div_(scales).round_().neg_().clamp_(0, kLevels);
  auto bytes = values.div(scales).round_().add_(zeros).clamp_(0, kLevels);
  auto header = at::cat({scales.flatten(), zeros.flatten()});
  return at::cat(
      {header.view(at::kByte),
       bytes.view(-1).narrow(0, 0, gradients.numel()).to(at::kByte)});
}

at::Tensor dequantize(const at::Tensor& all, int64_t channels, int64_t width) {
  const Message message(all, channels);
  auto values = in_channels(message.bytes.to(at::kFloat), channels, width);
  return values.sub_(message.zeros).mul_(message.scales);
}

// `width`: the elements of a channel; if it is 0, all elements are one channel.
CommHook quantization_hook(const char* name, ProcessGroupPtr given,
                           int64_t width) {
  return [name, group = internal::group_or_default(std::move(given)),
          width](GradBucket& bucket) {
    internal::require_real(bucket, name);
    at::NoGradGuard no_grad;
    const auto& buffer = bucket.buffer();
    const auto count = buffer.numel();
    if (count == 0) return completed_future(buffer);
    const auto channel = width == 0 ? count : width;
    const auto channels = (count + channel - 1) / channel;
    auto mine = quantize(buffer, channels, channel);
    auto everyones = at::empty({group->size(), mine.numel()}, mine.options());
    return internal::all_gather_then(
        everyones, mine, group, [buffer, everyones, channels, channel] {
          auto sum = dequantize(everyones[0], channels, channel);
          for (int64_t rank = 1; rank < everyones.size(0); ++rank) {
            sum.add_(dequantize(everyones[rank], channels, channel));
          }
          sum.div_(everyones.size(0));
          return buffer.copy_(sum.view(-1).narrow(0, 0, buffer.numel()));
        });
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

CommHook quantization_pertensor_hook(ProcessGroupPtr group) {
  return quantization_hook("quantization_pertensor_hook", std::move(group), 0);
}

CommHook quantization_perchannel_hook(ProcessGroupPtr group,
                                      int64_t bucket_size) {
  if (bucket_size < 1) {
    throw std::invalid_argument(c10::str(
        "quantization_perchannel_hook: bucket_size is ", bucket_size,
        "; give the number of elements that share a scale, 1 or more"));
  }
  return quantization_hook("quantization_perchannel_hook", std::move(group),
                           bucket_size);
}

}  // namespace lockstep
