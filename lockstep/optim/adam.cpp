#include "lockstep/optim/adam.h"

#include <ATen/ops/_fused_adam.h>

#include "lockstep/base/span.h"
#include "lockstep/optim/fused_step.h"

namespace lockstep::optim {

torch::optim::AdamOptions AdamOptions::to_torch() const {
  return torch::optim::AdamOptions(lr)
      .betas(betas)
      .eps(eps)
      .weight_decay(weight_decay)
      .amsgrad(amsgrad);
}

torch::optim::OptimizerParamGroup AdamGroup::to_torch(
    const torch::optim::AdamOptions& defaults) const {
  auto options = std::make_unique<torch::optim::AdamOptions>(defaults);
  if (lr) options->lr(*lr);
  if (betas) options->betas(*betas);
  if (eps) options->eps(*eps);
  if (weight_decay) options->weight_decay(*weight_decay);
  if (amsgrad) options->amsgrad(*amsgrad);
  return {params, std::move(options)};
}

Adam::Adam(std::vector<at::Tensor> parameters, const Options& options)
    : Adam(ParamGroups{OptimizerParamGroup(std::move(parameters))}, options) {}

Adam::Adam(const ParamGroups& groups, const Options& options)
    : Adam(groups, options.to_torch(), options.maximize) {}

Adam::Adam(const std::vector<AdamGroup>& groups, const Options& options)
    : Adam(internal::whole_groups(groups, options.to_torch()), options) {}

Adam::Adam(const ParamGroups& groups, const torch::optim::AdamOptions& options,
           bool maximize)
    : torch::optim::Adam(internal::distinct_groups("Adam", groups, options),
                         options),
      maximize_(maximize) {
  internal::keep_options("Adam", groups, *defaults_, param_groups_);
}

void Adam::add_param_group(const OptimizerParamGroup& group) {
  torch::optim::Adam::add_param_group(
      internal::distinct_groups("Adam", {group}, *defaults_, param_groups_)
          .front());
  internal::keep_options("Adam", {group}, *defaults_, param_groups_);
}

void Adam::add_param_group(const AdamGroup& group) {
  add_param_group(
      group.to_torch(static_cast<torch::optim::AdamOptions&>(*defaults_)));
}

at::Tensor Adam::step(LossClosure closure) {
  const at::Tensor loss = internal::loss_of(closure);
  const internal::Span span("optim", "step");
  const at::NoGradGuard no_grad;
  internal::step_adam<torch::optim::AdamOptions, torch::optim::AdamParamState>(
      "Adam", param_groups_, state_,
      [&](const auto& o, const internal::FusedBatch& batch,
          const auto& averages, const auto& squares, const auto& maxima,
          const auto& steps) {
        const auto [beta1, beta2] = o.betas();
        at::_fused_adam_(batch.parameters, batch.gradients, averages, squares,
                         maxima, steps, o.lr(), beta1, beta2, o.weight_decay(),
                         o.eps(), o.amsgrad(), maximize_);
      });
  return loss;
}

}  // namespace lockstep::optim
