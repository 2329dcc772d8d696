#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <utility>

namespace lockstep::internal {

// This header holds whatever differs between the versions of LibTorch that
// Lockstep compiles with, 2.12 and 2.13; no other file asks for the version.

// Returns a node of autograd, held as the edges of this version hold it: by a
// std::shared_ptr in 2.12, by a c10::intrusive_ptr from 2.13 on.
template <typename Node, typename... Arguments>
auto make_node(Arguments&&... arguments) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
#else
  // The deleter frees long graphs without recursion.
  return std::shared_ptr<Node>(new Node(std::forward<Arguments>(arguments)...),
                               torch::autograd::deleteNode);
#endif
}

}  // namespace lockstep::internal
