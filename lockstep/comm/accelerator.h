#pragma once

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceType.h>

#include <optional>

namespace lockstep::internal {

// Returns the type of the accelerator that LibTorch sees devices of (CUDA, XPU
// and so on); none if there is only the CPU.
inline std::optional<c10::DeviceType> visible_accelerator() {
  const auto type = at::getAccelerator();
  return type && at::accelerator::deviceCount() > 0 ? type : std::nullopt;
}

}  // namespace lockstep::internal
