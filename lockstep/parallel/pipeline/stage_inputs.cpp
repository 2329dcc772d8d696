#include "lockstep/parallel/pipeline/stage_inputs.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <utility>

namespace lockstep::internal {
namespace {

using torch::autograd::variable_list;

// Counts changes from 0 on, by itself: the micro-batches of a batch are views
// of one tensor, and a change of one is none of the others.
at::Tensor alias_of(const at::Tensor& input) { return input.variable_data(); }

struct StageInputs : torch::autograd::Function<StageInputs> {
  static variable_list forward(torch::autograd::AutogradContext* context,
                               at::TensorList inputs) {
    context->set_materialize_grads(false);
    // Not the inputs themselves, nor views of them, which autograd does not let
    // the caller change.
    variable_list aliases;
    for (const at::Tensor& input : inputs) aliases.push_back(alias_of(input));
    return aliases;
  }
  static variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                variable_list gradients) {
    return gradients;
  }
};

}  // namespace

std::vector<at::Tensor> stage_inputs(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> results(inputs.size());
  variable_list tracked;
  std::vector<size_t> places;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (at::GradMode::is_enabled() && inputs[i].requires_grad()) {
      tracked.push_back(inputs[i]);
      places.push_back(i);
    } else {
      results[i] = alias_of(inputs[i]);
    }
  }
  if (tracked.empty()) return results;
  // A vector would not be recognised as tensors.
  variable_list aliases = StageInputs::apply(at::TensorList(tracked));
  for (size_t k = 0; k < places.size(); ++k) {
    results[places[k]] = std::move(aliases[k]);
  }
  return results;
}

void report_changes(const std::vector<at::Tensor>& inputs,
                    const std::vector<at::Tensor>& aliases) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    // Inference tensors do not count.
    if (aliases[i].is_inference() || aliases[i]._version() == 0) continue;
    inputs[i].unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace lockstep::internal
