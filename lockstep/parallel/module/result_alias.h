#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::internal {

// Returns a tensor of the same memory and version counter whose node in the
// graph is new. It is not a view: if the caller of a forward changes it in
// place, autograd keeps the node, while it replaces the nodes of views.
at::Tensor result_alias(const at::Tensor& result);

}  // namespace lockstep::internal
