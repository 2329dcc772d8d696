// Operations whose kernels belong to the device: memory, views, copies, and
// some that only CUDA has.

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/simulated_cuda/device_interface.h"
#include "tests/simulated_cuda/device_memory.h"
#include "tests/simulated_cuda/operations.h"
#include "tests/simulated_cuda/scheduler.h"
#include "tests/simulated_cuda/settings.h"

namespace lockstep::internal::simulated_cuda {
namespace {

// ---- Memory ----

c10::Device device_for_new(std::optional<at::Layout> layout,
                           std::optional<at::Device> device,
                           std::optional<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided,
                              "simulated device: only dense tensors");
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return {kDeviceType, device && device->has_index()
                           ? checked_index(device->index())
                           : current_device()};
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_for_new(layout, device, pinned));
  return at::detail::empty_generic(size, &device_allocator(), kDeviceKey,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout,
                         std::optional<at::Device> device,
                         std::optional<bool> pinned) {
  const c10::DeviceGuard guard(device_for_new(layout, device, pinned));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           kDeviceKey,
                                           c10::dtype_or_default(dtype));
}

at::Tensor efficient_zeros(c10::SymIntArrayRef size,
                           std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout> layout,
                           std::optional<at::Device> device,
                           std::optional<bool> pinned) {
  at::native::ZeroTensorAllocator no_memory(
      device_for_new(layout, device, pinned));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &no_memory,
      kDeviceKey | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
      c10::dtype_or_default(dtype), {});
}

// Makes the storage of `tensor` hold what its sizes need.
void grow_storage(const at::Tensor& tensor) {
  const size_t bytes = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(),
      static_cast<size_t>(tensor.storage_offset()));
  const c10::Storage& storage = tensor.storage();
  if (tensor.numel() == 0 || bytes <= storage.nbytes()) return;
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr grown = device_allocator().allocate(bytes);
  if (storage.nbytes() > 0) {
    device_allocator().copy_data(grown.mutable_get(), storage.data(),
                                 storage.nbytes());
  }
  storage.set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format) impl->empty_tensor_restride(*format);
  grow_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& result, at::Storage storage,
                        c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* const impl = result.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride),
                                offset.expect_int());
  }
  grow_storage(result);
  return result;
}

at::Tensor& set_empty(at::Tensor& result) {
  const c10::Storage storage(c10::Storage::use_byte_size_t{}, 0,
                             c10::DataPtr(nullptr, result.device()),
                             &device_allocator(), /*resizable=*/true);
  return set_storage(result, storage, 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// ---- Copies ----

void wait_for(const c10::Stream& stream) {
  Scheduler::get().wait_for(Scheduler::get().end_of(stream));
}

void enqueue_copy(const c10::Stream& stream, const at::Tensor& to,
                  const at::Tensor& from, std::shared_ptr<void> owner = {}) {
  enqueue_kernel(stream,
                 [to, from, owner = std::move(owner)] { to.copy_(from); });
}

// The copy uses the streams of both devices, as CUDA's: the source's stream
// copies after the target's has come here, and this one waits for the copy.
void copy_on_devices(const at::Tensor& to, const at::Tensor& from) {
  MemoryViews views;
  const c10::Stream stream = current_stream(from.device().index());
  const c10::Stream target = current_stream(to.device().index());
  auto& scheduler = Scheduler::get();
  if (target != stream) {
    scheduler.enqueue_wait(stream, scheduler.end_of(target));
  }
  enqueue_copy(stream, views.of(to), views.of(from));
  if (target != stream) {
    scheduler.enqueue_wait(target, scheduler.end_of(stream));
  }
}

// A copy between the host and a device. Pinned memory, used directly, may be
// read or written later; what is converted or rearranged on the way, or is
// pageable, may not.
void copy_with_host(const at::Tensor& to, const at::Tensor& from,
                    bool non_blocking) {
  const bool upload = from.is_cpu();
  const at::Tensor& host = upload ? from : to;
  const at::Tensor& on_device = upload ? to : from;
  const c10::Stream stream = current_stream(on_device.device().index());
  MemoryViews views;
  const at::Tensor memory = views.of(on_device);
  const bool direct =
      to.dtype() == from.dtype() && to.sizes() == from.sizes() &&
      to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
      !host.is_conj() && !host.is_neg();
  auto pinned = pinned_block_of(host.const_data_ptr());
  if (non_blocking && pinned && direct) {
    // Does not own the tensor's storage: as with CUDA, the memory is kept.
    const at::Tensor view =
        at::from_blob(host.data_ptr(), host.sizes(), host.strides(),
                      host.options().pinned_memory(false));
    enqueue_copy(stream, upload ? memory : view, upload ? view : memory,
                 std::move(pinned));
  } else if (non_blocking && upload) {
    enqueue_copy(stream, memory, host.clone());
  } else {
    enqueue_copy(stream, upload ? memory : host, upload ? host : memory);
    wait_for(stream);
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source,
                  bool non_blocking) {
  if (self.is_same(source)) return self;
  const at::Tensor expanded = source.expand_as(self);
  if (self.numel() == 0) return self;
  if (self.is_cpu() || source.is_cpu()) {
    copy_with_host(self, expanded, non_blocking);
  } else {
    copy_on_devices(self, expanded);
  }
  return self;
}

// ---- Softmax, which only CUDA takes from float16 to float32 ----

template <auto Function>
at::Tensor& softmax_out(const at::Tensor& self, int64_t dim, bool half_to_float,
                        at::Tensor& out) {
  MemoryViews views;
  enqueue_kernel(
      current_stream(self.device().index()),
      [from = views.of(self), to = views.of(out), dim, half_to_float] {
        to.copy_(Function(half_to_float ? from.to(at::kFloat) : from, dim,
                          /*half_to_float=*/false));
      });
  return out;
}

template <auto Function>
at::Tensor& softmax_backward_out(const at::Tensor& grad,
                                 const at::Tensor& output, int64_t dim,
                                 at::ScalarType /*input_dtype*/,
                                 at::Tensor& out) {
  MemoryViews views;
  enqueue_kernel(
      current_stream(grad.device().index()),
      [grad = views.of(grad), output = views.of(output), to = views.of(out),
       dim] { to.copy_(Function(grad, output, dim, grad.scalar_type())); });
  return out;
}

// ---- Operations that only CUDA has, from others ----

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input,
                                                  double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) {
    return {input.clone(), at::ones_like(input, at::kBool)};
  }
  const at::Tensor mask =
      at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

int64_t fused_sdp_choice(const at::Tensor& /*query*/, const at::Tensor& /*key*/,
                         const at::Tensor& /*value*/,
                         const std::optional<at::Tensor>& /*mask*/,
                         double /*dropout*/, bool /*causal*/,
                         std::optional<double> /*scale*/, bool /*gqa*/) {
  return 0;  // the formula in operations of its own (SDPBackend::math)
}

// Dimensions but the channels'.
std::vector<int64_t> reduced_dimensions(const at::Tensor& input) {
  std::vector<int64_t> dimensions{0};
  for (int64_t i = 2; i < input.dim(); ++i) dimensions.push_back(i);
  return dimensions;
}

at::Tensor over_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = -1;
  return values.view(shape);
}

// Statistics are float32 if the input is float16 or bfloat16.
at::ScalarType statistics_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::tuple<at::Tensor, at::Tensor> batch_norm_stats(const at::Tensor& input,
                                                    double eps) {
  const at::Tensor values = input.to(statistics_type(input));
  const auto dimensions = reduced_dimensions(input);
  return {values.mean(dimensions),
          values.var(dimensions, /*unbiased=*/false).add_(eps).rsqrt_()};
}

std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats_with_counts(
    const at::Tensor& /*input*/, const at::Tensor& means,
    const at::Tensor& invstds, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, double momentum, double eps,
    const at::Tensor& counts) {
  const at::Tensor weights = counts.to(means.dtype()).view({-1, 1});
  const at::Tensor count = weights.sum();
  const at::Tensor mean = means.mul(weights).sum(0).div_(count);
  const at::Tensor squares = invstds.pow(-2).sub_(eps).add_(means.pow(2));
  const at::Tensor variance =
      squares.mul_(weights).sum(0).div_(count).sub_(mean.pow(2)).clamp_min_(0);
  if (running_mean && running_mean->defined()) {
    running_mean->mul_(1 - momentum).add_(mean, momentum);
  }
  if (running_var && running_var->defined()) {
    running_var->mul_(1 - momentum)
        .add_(variance.mul(count).div_(count.sub(1)), momentum);
  }
  return {mean, variance.add(eps).rsqrt_()};
}

at::Tensor batch_norm_elemt(const at::Tensor& input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias,
                            const at::Tensor& mean, const at::Tensor& invstd,
                            double /*eps*/) {
  at::Tensor result = input.to(mean.dtype())
                          .sub(over_channels(mean, input))
                          .mul_(over_channels(invstd, input));
  if (weight && weight->defined()) {
    result.mul_(over_channels(*weight, input));
  }
  if (bias && bias->defined()) result.add_(over_channels(*bias, input));
  return result.to(input.dtype());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>
batch_norm_backward_reduce(const at::Tensor& grad, const at::Tensor& input,
                           const at::Tensor& mean, const at::Tensor& invstd,
                           const std::optional<at::Tensor>& weight,
                           bool /*for_input*/, bool for_weight, bool for_bias) {
  const auto dimensions = reduced_dimensions(input);
  const at::Tensor dy = grad.to(mean.dtype());
  const at::Tensor sum_dy = dy.sum(dimensions);
  const at::Tensor sum_dy_xmu = input.to(mean.dtype())
                                    .sub(over_channels(mean, input))
                                    .mul_(dy)
                                    .sum(dimensions);
  const bool has_weight = weight && weight->defined();
  return {sum_dy, sum_dy_xmu,
          for_weight && has_weight ? sum_dy_xmu.mul(invstd).to(weight->dtype())
                                   : at::Tensor(),
          for_bias && has_weight ? sum_dy.to(weight->dtype()) : at::Tensor()};
}

at::Tensor batch_norm_backward_elemt(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
    const at::Tensor& invstd, const std::optional<at::Tensor>& weight,
    const at::Tensor& sum_dy, const at::Tensor& sum_dy_xmu,
    const at::Tensor& counts) {
  const at::Tensor count = counts.sum().to(mean.dtype());
  const auto of = [&](const at::Tensor& values) {
    return over_channels(values, input);
  };
  const at::Tensor centred = input.to(mean.dtype()).sub(of(mean));
  at::Tensor result =
      grad.to(mean.dtype())
          .sub(of(sum_dy.div(count)))
          .sub_(centred.mul(of(invstd.pow(2).mul(sum_dy_xmu).div(count))))
          .mul_(of(invstd));
  if (weight && weight->defined()) result.mul_(of(*weight));
  return result.to(input.dtype());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SIMULATED_DEVICE_TYPE, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &efficient_zeros);
  library.impl("resize_", &resize_);
  library.impl("set_", &set_empty);
  library.impl(
      "set_.source_Storage",
      [](at::Tensor& self, at::Storage from) -> at::Tensor& {
        const auto size = static_cast<int64_t>(from.nbytes() / self.itemsize());
        return set_storage(self, std::move(from), 0, {c10::SymInt(size)}, {});
      });
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor",
               [](at::Tensor& self, const at::Tensor& from) -> at::Tensor& {
                 return set_storage(self, from.storage(),
                                    from.sym_storage_offset(), from.sym_sizes(),
                                    from.sym_strides());
               });
  library.impl("record_stream", &record_stream);

  library.impl("as_strided", [](const at::Tensor& self,
                                c10::SymIntArrayRef size,
                                c10::SymIntArrayRef stride,
                                std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(
        self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
        offset ? std::optional(offset->expect_int()) : std::nullopt);
  });
  library.impl("view", [](const at::Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  library.impl("view.dtype", &at::native::view_dtype);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl(
      "_reshape_alias", [](const at::Tensor& self, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
        return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                          C10_AS_INTARRAYREF_SLOW(stride));
      });
  library.impl("unfold", &at::native::unfold);

  library.impl("copy_", &copy_);

  library.impl("_softmax.out", &softmax_out<at::_softmax>);
  library.impl("_log_softmax.out", &softmax_out<at::_log_softmax>);
  library.impl("_softmax_backward_data.out",
               &softmax_backward_out<at::_softmax_backward_data>);
  library.impl("_log_softmax_backward_data.out",
               &softmax_backward_out<at::_log_softmax_backward_data>);

  library.impl("native_dropout", &native_dropout);
  library.impl("_fused_sdp_choice", &fused_sdp_choice);
  library.impl("batch_norm_stats", &batch_norm_stats);
  library.impl("batch_norm_gather_stats_with_counts",
               &batch_norm_gather_stats_with_counts);
  library.impl("batch_norm_elemt", &batch_norm_elemt);
  library.impl("batch_norm_backward_reduce", &batch_norm_backward_reduce);
  library.impl("batch_norm_backward_elemt", &batch_norm_backward_elemt);
}

}  // namespace lockstep::internal::simulated_cuda
