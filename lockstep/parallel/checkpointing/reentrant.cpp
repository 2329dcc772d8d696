#include "lockstep/parallel/checkpointing/forms.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/parallel/checkpointing/forward_conditions.h"
#include "lockstep/parallel/checkpointing/input_versions.h"

namespace lockstep::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The part that the autograd context keeps for backward, beside the inputs.
struct ReentrantState : torch::CustomClassHolder {
  std::shared_ptr<CheckpointedCall> call;
  std::optional<ForwardConditions> conditions;
  std::vector<std::vector<int64_t>> sizes;  // of the results
};

bool is_among(const variable_list& tensors, const at::Tensor& tensor) {
  return std::ranges::any_of(
      tensors, [&](const at::Tensor& each) { return each.is_same(tensor); });
}

class ReentrantFunction : public torch::autograd::Function<ReentrantFunction> {
 public:
  static variable_list forward(AutogradContext* context,
                               const c10::intrusive_ptr<ReentrantState>& state,
                               const std::function<variable_list()>& first,
                               at::TensorList given) {
    const auto inputs = given.vec();
    const InputVersions versions(inputs);
    auto results = first();
    versions.require_unchanged(inputs);
    for (auto& result : results) {
      state->sizes.push_back(result.sizes().vec());
      // Autograd makes the results part of the graph. If somebody else holds
      // this tensor (a buffer, a parameter), the graph gets an alias.
      if (result.use_count() > 1 && !is_among(inputs, result)) {
        result = result.variable_data();
      }
    }
    context->save_for_backward(inputs);
    context->set_materialize_grads(false);
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    return results;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw std::runtime_error(
          "checkpoint: with use_reentrant only backward() without `inputs` is "
          "possible, not grad(); set use_reentrant to false");
    }
    if (at::GradMode::is_enabled()) {
      throw std::runtime_error(
          "checkpoint: with use_reentrant there is no second derivative; call "
          "backward() without create_graph, or set use_reentrant to false");
    }
    const auto kept = context->saved_data["state"].toCapsule();
    const auto& state = static_cast<ReentrantState&>(*kept);
    variable_list inputs;
    for (const auto& saved : context->get_saved_variables()) {
      inputs.push_back(saved.detach().requires_grad_(saved.requires_grad()));
    }
    variable_list results;
    {
      const at::AutoGradMode with_graph(true);
      const ForwardConditions::Restored restored(*state.conditions);
      results = state.call->again(inputs);
    }
    require_same(state, results);
    variable_list roots;
    variable_list root_gradients;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!gradients[i].defined() || !results[i].requires_grad()) continue;
      roots.push_back(std::move(results[i]));
      root_gradients.push_back(gradients[i]);
    }
    results.clear();
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    variable_list input_gradients(2);  // of `state` and `first`
    for (const auto& input : inputs) input_gradients.push_back(input.grad());
    return input_gradients;
  }

 private:
  static void require_same(const ReentrantState& state,
                           const variable_list& results) {
    std::ostringstream text;
    text << "checkpoint: a recomputation differs from its forward: ";
    if (results.size() != state.sizes.size()) {
      text << "the function returned " << state.sizes.size()
           << " tensors and now returns " << results.size();
      throw CheckpointError(text.str());
    }
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].sizes() == at::IntArrayRef(state.sizes[i])) continue;
      text << "tensor " << i + 1 << " of the " << results.size()
           << " that the function returns had the shape "
           << at::IntArrayRef(state.sizes[i]) << " and now has "
           << results[i].sizes();
      throw CheckpointError(text.str());
    }
  }
};

}  // namespace

std::vector<at::Tensor> reentrant_checkpoint(
    const CheckpointOptions& options, std::shared_ptr<CheckpointedCall> call,
    const std::function<std::vector<at::Tensor>()>& first,
    const std::vector<at::Tensor>& inputs) {
  if (std::ranges::none_of(inputs, [](const at::Tensor& each) {
        return each.requires_grad();
      })) {
    throw std::invalid_argument(
        "checkpoint: with use_reentrant none of the arguments requires grad, "
        "so no gradient would reach the parameters of the function; call "
        "requires_grad_() on an input, or set use_reentrant to false");
  }
  auto state = c10::make_intrusive<ReentrantState>();
  state->call = std::move(call);
  state->conditions.emplace(inputs, options.preserve_rng_state);
  // LibTorch sees no tensors in a std::vector.
  return ReentrantFunction::apply(state, first, at::TensorList(inputs));
}

}  // namespace lockstep::internal
