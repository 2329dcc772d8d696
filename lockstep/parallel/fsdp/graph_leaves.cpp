#include "lockstep/parallel/fsdp/graph_leaves.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <unordered_set>

#include "lockstep/parallel/fsdp/flat_parameters.h"

namespace lockstep::internal {

std::vector<at::Tensor> graph_leaves(
    const std::vector<at::Tensor>& results,
    const std::function<bool(const torch::autograd::Node&)>& follow) {
  using torch::autograd::AccumulateGrad;
  using torch::autograd::Node;
  std::vector<at::Tensor> leaves;
  std::vector<const Node*> open;
  for (const at::Tensor& result : results) {
    open.push_back(result.grad_fn().get());
  }
  std::unordered_set<const Node*> seen;
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second || !follow(*node)) {
      continue;
    }
    for (const auto& edge : node->next_edges()) {
      open.push_back(edge.function.get());
    }
    const auto* leaf = dynamic_cast<const AccumulateGrad*>(node);
    if (leaf != nullptr && unit_of(leaf->variable) == nullptr) {
      leaves.push_back(leaf->variable);
    }
  }
  return leaves;
}

}  // namespace lockstep::internal
