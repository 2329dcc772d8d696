#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <vector>

namespace lockstep::internal {

// Runs `work`, the backward of a node whose gradients are on several devices
// and whose result is on `device`. Autograd orders only one stream of a node
// (`of_node`, Node::stream()): there all gradients are ready, and there the
// result must be. So the current streams of the devices begin after that one,
// and it goes on after them.
at::Tensor across_devices(const std::optional<c10::Stream>& of_node,
                          const std::vector<at::Tensor>& gradients,
                          const at::Device& device,
                          const std::function<at::Tensor()>& work);

}  // namespace lockstep::internal
