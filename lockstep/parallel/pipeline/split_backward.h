#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <vector>

namespace lockstep::internal {

// A backward in two parts, as zero-bubble schedules need it: first the
// gradients of a stage's inputs, which the previous stage waits for, and later
// those of its parameters. (In Python: stage_backward_input() and
// stage_backward_weight() of torch.distributed.pipelining.)
//
// The first part runs the autograd graph from the outputs to the inputs only.
// At each node where a way to a parameter leaves the way to the inputs, it
// keeps the gradient that arrives there. Then it cuts these nodes off from the
// nodes between them and the inputs, so that what is left are the ways to the
// parameters, and what the graph saved for the rest is freed. The second part
// is one ordinary backward through what is left: it accumulates in .grad and
// calls the hooks of parameters.
//
// Each derivative is computed once: the nodes where ways part run twice, and
// each time compute only what is asked for, as all of LibTorch's nodes do. A
// torch::autograd::Function that does not ask ctx->needs_input_grad() computes
// all of its gradients twice. Between the parts, the gradients that arrive at
// these nodes are kept: about one tensor of the size of its output for each
// layer with parameters. A hook of a tensor that such a node has computed runs
// in each part, on the same gradient.
class SplitBackward {
 public:
  // Runs the first part. `gradients[i]` belongs to `outputs[i]`, which may be a
  // leaf or without gradient. `inputs` are leaves; the result has one gradient
  // for each, undefined for those that need none or are unused.
  std::vector<at::Tensor> inputs(const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& gradients,
                                 const std::vector<at::Tensor>& inputs);

  // Runs the second part, once.
  void parameters();

 private:
  torch::autograd::edge_list roots_{};
  std::vector<at::Tensor> gradients_{};
};

}  // namespace lockstep::internal
