#include "lockstep/parallel/pipeline/split_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace lockstep::internal {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;

// The nodes of a graph from which a way leads to one of some leaves.
class WaysToInputs {
 public:
  WaysToInputs(const edge_list& roots, const edge_list& leaves) {
    for (const Edge& leaf : leaves) leads_[leaf.function.get()] = true;
    for (const Edge& root : roots) visit(root.function.get());
  }
  bool has(const Edge& edge) const {
    return edge.is_valid() && leads_.at(edge.function.get());
  }
  // Calls `visitor` with each edge of the graph.
  template <typename Visitor>
  void for_each_edge(const Visitor& visitor) const {
    for (const Node* node : order_) {
      for (const Edge& edge : node->next_edges()) {
        if (edge.is_valid()) visitor(edge);
      }
    }
  }

 private:
  // Visits every node below `root` after those that it leads to. Without
  // recursion, because graphs are deep.
  void visit(Node* root) {
    std::vector<std::pair<Node*, size_t>> path;
    const auto enter = [&](Node* node) {
      if (entered_.insert(node).second) path.emplace_back(node, 0);
    };
    enter(root);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->next_edges().size()) {
        Node* child = node->next_edges()[next++].function.get();
        if (child != nullptr) enter(child);
        continue;
      }
      bool leads = leads_[node];
      for (const Edge& edge : node->next_edges()) {
        if (edge.is_valid()) leads |= leads_[edge.function.get()];
      }
      leads_[node] = leads;
      order_.push_back(node);
      path.pop_back();
    }
  }

  std::unordered_map<Node*, bool> leads_;
  std::unordered_set<Node*> entered_;
  std::vector<Node*> order_;
};

// Returns the nodes on the way to the inputs that have an edge elsewhere. They
// are found as the targets of edges, or as roots, so that they can be held.
std::vector<Edge> forks_of(const WaysToInputs& ways, const edge_list& roots) {
  std::vector<Edge> forks;
  std::unordered_set<Node*> seen;
  const auto consider = [&](const Edge& edge) {
    if (!ways.has(edge) || !seen.insert(edge.function.get()).second) {
      return;
    }
    for (const Edge& next : edge.function->next_edges()) {
      if (!next.is_valid() || ways.has(next)) continue;
      forks.emplace_back(edge.function, 0);
      return;
    }
  };
  for (const Edge& root : roots) consider(root);
  ways.for_each_edge(consider);
  return forks;
}

// Cuts a fork off from the way to the inputs. Hooks of tensors stay: the engine
// has kept the gradients as they were before these hooks.
void cut(Node& fork, const WaysToInputs& ways) {
  for (Edge& edge : fork.next_edges()) {
    if (ways.has(edge)) edge = Edge();
  }
}

}  // namespace

std::vector<at::Tensor> SplitBackward::inputs(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& gradients,
    const std::vector<at::Tensor>& inputs) {
  edge_list roots;
  std::vector<at::Tensor> root_gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
    roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
    root_gradients.push_back(gradients[i]);
  }
  std::vector<size_t> wanted;
  edge_list results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) continue;
    wanted.push_back(i);
    results.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
  }
  std::vector<at::Tensor> input_gradients(inputs.size());
  const WaysToInputs ways(roots, results);

  // Outputs from which no way leads to the inputs wait for the second part.
  edge_list way_roots;
  std::vector<at::Tensor> way_gradients;
  for (size_t i = 0; i < roots.size(); ++i) {
    const bool on_way = ways.has(roots[i]);
    (on_way ? way_roots : roots_).push_back(roots[i]);
    (on_way ? way_gradients : gradients_).push_back(root_gradients[i]);
  }
  if (way_roots.empty()) return input_gradients;

  const std::vector<Edge> forks = forks_of(ways, way_roots);
  for (const Edge& fork : forks) {
    for (uint32_t i = 0; i < fork.function->num_inputs(); ++i) {
      results.emplace_back(fork.function, i);
    }
  }
  std::vector<at::Tensor> computed = Engine::get_default_engine().execute(
      way_roots, way_gradients, /*keep_graph=*/true, /*create_graph=*/false,
      /*accumulate_grad=*/false, results);
  for (size_t i = 0; i < wanted.size(); ++i) {
    input_gradients[wanted[i]] = std::move(computed[i]);
  }
  for (size_t i = wanted.size(); i < results.size(); ++i) {
    if (!computed[i].defined()) continue;
    roots_.push_back(results[i]);
    gradients_.push_back(std::move(computed[i]));
  }
  for (const Edge& fork : forks) cut(*fork.function, ways);
  return input_gradients;
}

void SplitBackward::parameters() {
  const edge_list roots = std::exchange(roots_, {});
  const std::vector<at::Tensor> gradients = std::exchange(gradients_, {});
  if (roots.empty()) return;
  Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false,
                                       /*create_graph=*/false,
                                       /*accumulate_grad=*/true);
}

}  // namespace lockstep::internal
