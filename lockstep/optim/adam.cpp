#include "lockstep/optim/adam.h"

#include <ATen/ops/_fused_adam.h>

#include "lockstep/optim/fused_step.h"

namespace lockstep::optim {

torch::optim::AdamOptions AdamOptions::to_torch() const {
  return torch::optim::AdamOptions(lr)
      .betas(betas)
      .eps(eps)
      .weight_decay(weight_decay)
      .amsgrad(amsgrad);
}

Adam::Adam(std::vector<at::Tensor> parameters, const Options& options)
    : torch::optim::Adam(std::move(parameters), options.to_torch()),
      maximize_(options.maximize) {}

Adam::Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           const Options& options)
    : torch::optim::Adam(groups, options.to_torch()),
      maximize_(options.maximize) {}

at::Tensor Adam::step(LossClosure closure) {
  const at::Tensor loss = loss_of(closure);
  const at::NoGradGuard no_grad;
  step_adam<torch::optim::AdamOptions, torch::optim::AdamParamState>(
      "Adam", param_groups_, state_,
      [&](const auto& o, const FusedBatch& batch, const auto& averages,
          const auto& squares, const auto& maxima, const auto& steps) {
        const auto [beta1, beta2] = o.betas();
        at::_fused_adam_(batch.parameters, batch.gradients, averages, squares,
                         maxima, steps, o.lr(), beta1, beta2, o.weight_decay(),
                         o.eps(), o.amsgrad(), maximize_);
      });
  return loss;
}

}  // namespace lockstep::optim
