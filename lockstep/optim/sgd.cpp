#include "lockstep/optim/sgd.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_complex.h>

#include "lockstep/optim/fused_step.h"
#include "lockstep/trace/span.h"

namespace lockstep::optim {
namespace {

using State = torch::optim::SGDParamState;

// Returns nullptr before the parameter's first step.
at::Tensor* momentum_of(internal::States& states, const at::Tensor& parameter) {
  const auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found == states.end() || !found->second) return nullptr;
  at::Tensor& momentum = static_cast<State&>(*found->second).momentum_buffer();
  return momentum.defined() ? &momentum : nullptr;
}

void keep_momentum(internal::States& states, const at::Tensor& parameter,
                   const at::Tensor& momentum) {
  auto& state = states[parameter.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<State>();
  static_cast<State&>(*state).momentum_buffer(momentum);
}

// Steps with momentum. The kernel is told for a whole call whether this is the
// first step, so parameters in their first step have a call of their own. Their
// momenta are kept only when it has returned: if memory runs out before, the
// step can be made again.
void step_with_momentum(const std::vector<at::Tensor>& parameters,
                        const internal::FusedBatch& batch,
                        internal::States& states,
                        const torch::optim::SGDOptions& o, bool maximize) {
  struct Part {
    std::vector<at::Tensor> parameters{};
    std::vector<at::Tensor> gradients{};
    std::vector<at::Tensor> momenta{};
  };
  Part first, later;
  std::vector<std::pair<at::Tensor, at::Tensor>> made;  // of `first`
  for (size_t i = 0; i < batch.parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[batch.numbers[i]];
    at::Tensor* const kept = momentum_of(states, parameter);
    if (kept) {
      internal::fit_state("SGD", parameter, batch.numbers[i], "momentum_buffer",
                          *kept);
    } else {
      made.emplace_back(parameter, at::empty_like(parameter.detach()));
    }
    Part& part = kept ? later : first;
    part.parameters.push_back(batch.parameters[i]);
    part.gradients.push_back(batch.gradients[i]);
    part.momenta.push_back(
        internal::as_real(kept ? *kept : made.back().second));
  }
  for (Part* part : {&first, &later}) {
    if (part->momenta.empty()) continue;
    internal::raise_versions(part->parameters);
    internal::raise_versions(part->momenta);
    at::_fused_sgd_(part->parameters, part->gradients, part->momenta,
                    o.weight_decay(), o.momentum(), o.lr(), o.dampening(),
                    o.nesterov(), maximize, part == &first);
    if (part == &later) continue;
    for (const auto& [parameter, momentum] : made) {
      keep_momentum(states, parameter, momentum);
    }
  }
}

// Steps with an operation for each term, as SGD(fused=False) does in Python.
// The fused CPU kernel of LibTorch 2.13 leaves most elements of half-precision
// parameters as they are, and reads momenta that were never written. All memory
// for a parameter is taken before its momentum changes.
void step_unfused(const std::vector<at::Tensor>& parameters,
                  const internal::FusedBatch& batch, internal::States& states,
                  const torch::optim::SGDOptions& o, bool maximize) {
  internal::raise_versions(batch.parameters);
  for (size_t i = 0; i < batch.parameters.size(); ++i) {
    const at::Tensor& owner = parameters[batch.numbers[i]];
    at::Tensor parameter = batch.parameters[i];
    at::Tensor change = batch.gradients[i];
    at::Tensor first;  // momentum
    if (maximize) change = change.neg();
    if (o.weight_decay() != 0) change = change.add(parameter, o.weight_decay());
    if (o.momentum() != 0) {
      at::Tensor* const kept = momentum_of(states, owner);
      at::Tensor ahead = o.nesterov() ? change.clone() : at::Tensor();
      if (kept) {
        internal::fit_state("SGD", owner, batch.numbers[i], "momentum_buffer",
                            *kept);
        // As Python multiplies; mul_(double) rounds the factor to the dtype.
        const at::Tensor factor =
            at::native::wrapped_scalar_tensor(o.momentum());
        internal::raise_versions(*kept);
        internal::as_real(*kept).mul_(factor).add_(change, 1 - o.dampening());
      } else {
        first = change.clone();
      }
      const at::Tensor momentum = kept ? internal::as_real(*kept) : first;
      change = o.nesterov() ? ahead.add_(momentum, o.momentum()) : momentum;
    }
    parameter.add_(change, -o.lr());
    if (!first.defined()) continue;
    keep_momentum(states, owner,
                  owner.is_complex() ? at::view_as_complex(first) : first);
  }
}

bool has_fused_kernel(const at::Tensor& parameter) {
  return !parameter.device().is_cpu() ||
         !at::isReducedFloatingType(parameter.scalar_type());
}

}  // namespace

torch::optim::SGDOptions SGDOptions::to_torch() const {
  return torch::optim::SGDOptions(lr)
      .momentum(momentum)
      .dampening(dampening)
      .weight_decay(weight_decay)
      .nesterov(nesterov);
}

torch::optim::OptimizerParamGroup SGDGroup::to_torch(
    const torch::optim::SGDOptions& defaults) const {
  auto options =
      std::make_unique<internal::MeantOptions<torch::optim::SGDOptions>>(
          defaults);
  if (lr) options->lr(*lr);
  if (momentum) options->momentum(*momentum);
  if (dampening) options->dampening(*dampening);
  if (weight_decay) options->weight_decay(*weight_decay);
  if (nesterov) options->nesterov(*nesterov);
  return {params, std::move(options)};
}

at::Tensor SGD::step(LossClosure closure) {
  const at::Tensor loss = internal::loss_of(closure);
  const internal::Span span("optim", "step");
  const at::NoGradGuard no_grad;
  const auto batches = internal::fused_batches("SGD", param_groups_);
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    auto& group = param_groups_[g];
    const auto& o = static_cast<torch::optim::SGDOptions&>(group.options());
    for (const internal::FusedBatch& batch : batches[g]) {
      if (!has_fused_kernel(batch.parameters.front())) {
        step_unfused(group.params(), batch, state_, o, maximize());
        continue;
      }
      if (o.momentum() != 0) {
        step_with_momentum(group.params(), batch, state_, o, maximize());
        continue;
      }
      internal::raise_versions(batch.parameters);
      at::_fused_sgd_(batch.parameters, batch.gradients, {}, o.weight_decay(),
                      0, o.lr(), o.dampening(), o.nesterov(), maximize(),
                      false);
    }
  }
  return loss;
}

}  // namespace lockstep::optim
