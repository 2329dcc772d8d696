#pragma once

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace lockstep::internal {

// Returns the type of the accelerator that LibTorch sees devices of (CUDA, XPU
// and so on); none if there is only the CPU.
inline std::optional<c10::DeviceType> visible_accelerator() {
  const auto type = at::getAccelerator();
  return type && at::accelerator::deviceCount() > 0 ? type : std::nullopt;
}

// Returns this thread's current stream of the device; none if that is not an
// accelerator.
inline std::optional<c10::Stream> current_stream(const c10::Device& device) {
  if (device.is_cpu() || !at::isAccelerator(device.type())) return {};
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Makes `waiting` wait for all that `awaited` has been given.
inline void await_stream(const c10::Stream& waiting,
                         const c10::Stream& awaited) {
  if (waiting == awaited) return;
  c10::Event event(awaited.device_type());
  event.record(awaited);
  event.block(waiting);
}

// Must be called for a tensor that may be dropped while the current stream of
// its device still uses it, unless its memory was allocated on that stream:
// otherwise the next tensor gets the memory at once.
inline void keep_for_current_stream(const at::Tensor& tensor) {
  const auto stream = current_stream(tensor.device());
  if (stream) tensor.record_stream(*stream);
}

// Blocks until this thread's current stream of the tensor's device has done
// what it was given. Call it before another thread uses the tensor: that thread
// has a current stream of its own. Does nothing for a tensor on the CPU.
inline void finish_current_stream(const at::Tensor& tensor) {
  const auto stream = current_stream(tensor.device());
  if (stream) stream->synchronize();
}

}  // namespace lockstep::internal
