#include "lockstep/data/batch_transfer.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <vector>

#include "lockstep/comm/accelerator.h"

namespace lockstep::internal {
namespace {

bool is_found(at::Device device) {
  if (device.is_cpu()) return true;
  if (!c10::impl::hasDeviceGuardImpl(device.type())) return false;
  const auto count = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
  return count > 0 && device.index() < count;
}

// Returns the tensors with memory of their own that `tensor` is made of.
std::vector<at::Tensor> dense_parts(const at::Tensor& tensor) {
  switch (tensor.layout()) {
    case at::kSparse:
      return {tensor._indices(), tensor._values()};
    case at::kSparseCsr:
    case at::kSparseBsr:
      return {tensor.crow_indices(), tensor.col_indices(), tensor.values()};
    case at::kSparseCsc:
    case at::kSparseBsc:
      return {tensor.ccol_indices(), tensor.row_indices(), tensor.values()};
    default:
      return {tensor};
  }
}

}  // namespace

BatchTransfer::BatchTransfer(bool pin_memory, std::optional<at::Device> device,
                             bool ahead)
    : pins_(pin_memory && visible_accelerator()), device_(device) {
  if (!device_) return;
  if (!is_found(*device_)) {
    throw std::invalid_argument(
        "DataLoader: the device is " + device_->str() +
        ", but this LibTorch finds no such device; give "
        "another device, or none");
  }
  if (device_->is_cpu() || !at::isAccelerator(device_->type())) return;
  const c10::impl::VirtualGuardImpl device_type(device_->type());
  // A device without a number is the current one of the thread that makes the
  // loader; workers may have another one.
  if (!device_->has_index()) device_ = device_type.getDevice();
  if (ahead) stream_ = device_type.getStreamFromGlobalPool(*device_);
}

at::Tensor BatchTransfer::moved(const at::Tensor& tensor) const {
  at::Tensor source = tensor;
  // Only from pinned memory a copy to the device does not block this thread.
  if ((pins_ || stream_) && source.is_cpu() &&
      source.layout() == at::kStrided && !source.is_pinned()) {
    source = source.pin_memory();
  }
  // A copy to the CPU that does not block may end after the loop reads it.
  return device_ ? source.to(*device_, source.scalar_type(),
                             /*non_blocking=*/!device_->is_cpu())
                 : source;
}

c10::Stream BatchTransfer::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_);
}

BatchTransfer::Copied BatchTransfer::begin_copy(
    const Visitor& for_each_tensor) const {
  const auto move_all = [&] {
    for_each_tensor([&](at::Tensor& tensor) { tensor = moved(tensor); });
  };
  if (!stream_) {
    move_all();
    return std::nullopt;
  }
  // The dataset may have made tensors on the device, on this thread's stream.
  c10::Event made(device_->type());
  made.record(current_stream());
  made.block(*stream_);
  // The guard selects the device, too; memory is allocated on this stream.
  const c10::StreamGuard guard(*stream_);
  move_all();
  Copied copied(std::in_place, device_->type());
  copied->record(*stream_);
  return copied;
}

void BatchTransfer::end_copy(Copied& copied,
                             const Visitor& for_each_tensor) const {
  const c10::Stream current = current_stream();
  copied->block(current);
  // The memory belongs to the stream of the copies. When the loop gives it back
  // its stream may still use it.
  for_each_tensor([&](at::Tensor& tensor) {
    for (const at::Tensor& part : dense_parts(tensor)) {
      part.record_stream(current);
    }
  });
  copied.reset();
}

}  // namespace lockstep::internal
