#pragma once

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace lockstep::internal {

// Returns the type of the accelerator that LibTorch sees devices of (CUDA, XPU
// and so on); none if there is only the CPU.
inline std::optional<c10::DeviceType> visible_accelerator() {
  const auto type = at::getAccelerator();
  return type && at::accelerator::deviceCount() > 0 ? type : std::nullopt;
}

// Blocks until this thread's current stream of the tensor's device has done
// what it was given. Call it before another thread uses the tensor: that thread
// has a current stream of its own. Does nothing for a tensor on the CPU.
inline void finish_current_stream(const at::Tensor& tensor) {
  if (!at::isAccelerator(tensor.device().type())) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.synchronizeStream(guard.getStream(tensor.device()));
}

}  // namespace lockstep::internal
