#include "lockstep/parallel/ddp/comm_hook.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <stdexcept>

namespace lockstep {

void GradBucket::set_buffer(at::Tensor buffer) {
  if (buffer.dim() != 1 || buffer.numel() != buffer_.numel() ||
      !buffer.is_contiguous()) {
    throw std::invalid_argument(
        c10::str("GradBucket::set_buffer: the tensor is ", buffer.sizes(),
                 buffer.is_contiguous() ? "" : ", not contiguous",
                 "; give a contiguous tensor of [", buffer_.numel(), "]"));
  }
  int64_t offset = buffer.storage_offset();
  for (auto& gradient : gradients_) {
    const auto count = gradient.numel();
    gradient = buffer.as_strided(gradient.sizes(), gradient.strides(), offset);
    offset += count;
  }
  buffer_ = std::move(buffer);
}

CommFuture completed_future(const at::Tensor& value) {
  std::vector<c10::Device> devices;
  if (!value.is_cpu()) devices.push_back(value.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(),
                                                         std::move(devices));
  future->markCompleted(value);
  return future;
}

at::Tensor wait_for_tensor(const CommFuture& future) {
  if (!future) {
    throw std::invalid_argument(
        "a communication hook returned no future; return a future that "
        "completes with the bucket's gradients, such as "
        "completed_future(bucket.buffer())");
  }
  future->waitAndThrow();
  const auto& value = future->constValue();
  if (value.isTensor()) return value.toTensor();
  if (value.isTensorList() && value.toTensorList().size() == 1) {
    return value.toTensorList().get(0);
  }
  throw std::invalid_argument(
      "the future of a communication hook completed with " +
      (value.isTensorList()
           ? c10::str("a list of ", value.toTensorList().size(), " tensors")
           : "a " + value.tagKind()) +
      "; it must be one tensor, or a list of one");
}

}  // namespace lockstep
