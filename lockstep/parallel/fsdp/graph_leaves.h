#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace lockstep::internal {

// Returns the leaves, each once, to which the graphs of `results` lead through
// nodes for which `follow` returns true. Parameters in a FullyShard are not
// among them: their unit looks after them.
std::vector<at::Tensor> graph_leaves(
    const std::vector<at::Tensor>& results,
    const std::function<bool(const torch::autograd::Node&)>& follow);

}  // namespace lockstep::internal
