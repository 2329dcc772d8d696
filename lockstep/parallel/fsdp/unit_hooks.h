#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace lockstep::internal {

class ShardedUnit;

// One forward of a unit in grad mode. The nodes of its graph own it, so it
// lives as long as a backward through them is possible.
struct UnitCall {
  std::shared_ptr<ShardedUnit> unit;
  // The number of the outermost forward in which it happened, and its place in
  // the order in which the forwards of units ended there.
  int64_t forward = 0;
  size_t position = 0;
  // Whether the running backward has left it.
  bool passed = false;
};

// Returns an alias of `result`. Autograd calls unit->before_backward() before
// it does any work on the graph that leads there. The alias is not a view that
// autograd knows, so if it is written in place, its graph still leads there.
at::Tensor announce_backward(const at::Tensor& result,
                             const std::shared_ptr<UnitCall>& call);

// The same for a tensor that must stay, which must not be written in place.
// Does nothing for leaves.
void announce_backward_of(const at::Tensor& result,
                          const std::shared_ptr<UnitCall>& call);

// Replaces those of `inputs` that require grad by aliases, equal ones by one.
// Autograd calls unit->after_backward() when the gradients of all of them are
// complete, which is after all other work on the unit's graph that has been
// recorded since. Does nothing if none requires grad.
void watch_inputs(const std::vector<at::Tensor*>& inputs,
                  const std::shared_ptr<UnitCall>& call);

// Makes autograd call unit->gradient_came() when it has added to the .grad of
// `parameter`.
void watch_gradient(const at::Tensor& parameter,
                    std::weak_ptr<ShardedUnit> unit);

// Inside of a backward: calls `ended` when the graph task that runs now has
// done all its work, or `died` if an exception ends it.
void at_end_of_backward(std::function<void()> ended,
                        std::function<void()> died);

// Inside of a backward: whether it adds to the .grad of one of `tensors`, which
// grad() does not.
bool accumulates_into(const std::vector<at::Tensor>& tensors);

// Returns the leaves, each once, to which the graphs of `results` lead through
// nodes for which `follow` returns true. Parameters in a FullyShard are not
// among them: their unit looks after them.
std::vector<at::Tensor> graph_leaves(
    const std::vector<at::Tensor>& results,
    const std::function<bool(const torch::autograd::Node&)>& follow);

}  // namespace lockstep::internal
