#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>

#include "lockstep/comm/group_inside.h"

namespace lockstep::internal {

// Returns the device of `type` to which this rank's backend is bound: NCCL
// takes tensors of that one only. None if the backend takes tensors of any
// device.
inline std::optional<c10::Device> bound_device(const ProcessGroup& group,
                                               c10::DeviceType type) {
  if (!inside(group).has_backend(type)) return {};
  return inside(group).backend(type).getBoundDeviceId();
}

// Returns " on cuda:0, not on local_device(), cuda:1" if the group does not
// take the tensor because of its device; otherwise "". Ranks that compare
// tensors add this to their descriptions: a rank that threw alone would leave
// the others in their first collective.
inline std::string words_of_other_device(const at::Tensor& tensor,
                                         const ProcessGroup& group) {
  const auto bound = bound_device(group, tensor.device().type());
  if (!bound || tensor.device() == *bound) return {};
  return c10::str(" on ", tensor.device(), ", not on local_device(), ", *bound);
}

}  // namespace lockstep::internal
