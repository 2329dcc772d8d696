#include "lockstep/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>

#include "lockstep/base/span.h"
#include "lockstep/optim/fused_step.h"

namespace lockstep::optim {

torch::optim::AdamWOptions AdamWOptions::to_torch() const {
  return torch::optim::AdamWOptions(lr)
      .betas(betas)
      .eps(eps)
      .weight_decay(weight_decay)
      .amsgrad(amsgrad);
}

torch::optim::OptimizerParamGroup AdamWGroup::to_torch(
    const torch::optim::AdamWOptions& defaults) const {
  auto options = std::make_unique<torch::optim::AdamWOptions>(defaults);
  if (lr) options->lr(*lr);
  if (betas) options->betas(*betas);
  if (eps) options->eps(*eps);
  if (weight_decay) options->weight_decay(*weight_decay);
  if (amsgrad) options->amsgrad(*amsgrad);
  return {params, std::move(options)};
}

AdamW::AdamW(std::vector<at::Tensor> parameters, const Options& options)
    : AdamW(ParamGroups{OptimizerParamGroup(std::move(parameters))}, options) {}

AdamW::AdamW(const ParamGroups& groups, const Options& options)
    : AdamW(groups, options.to_torch(), options.maximize) {}

AdamW::AdamW(const std::vector<AdamWGroup>& groups, const Options& options)
    : AdamW(internal::whole_groups(groups, options.to_torch()), options) {}

AdamW::AdamW(const ParamGroups& groups,
             const torch::optim::AdamWOptions& options, bool maximize)
    : torch::optim::AdamW(internal::distinct_groups("AdamW", groups, options),
                          options),
      maximize_(maximize) {
  internal::keep_options("AdamW", groups, *defaults_, param_groups_);
}

void AdamW::add_param_group(const OptimizerParamGroup& group) {
  torch::optim::AdamW::add_param_group(
      internal::distinct_groups("AdamW", {group}, *defaults_, param_groups_)
          .front());
  internal::keep_options("AdamW", {group}, *defaults_, param_groups_);
}

void AdamW::add_param_group(const AdamWGroup& group) {
  add_param_group(
      group.to_torch(static_cast<torch::optim::AdamWOptions&>(*defaults_)));
}

at::Tensor AdamW::step(LossClosure closure) {
  const at::Tensor loss = internal::loss_of(closure);
  const internal::Span span("optim", "step");
  const at::NoGradGuard no_grad;
  internal::step_adam<torch::optim::AdamWOptions,
                      torch::optim::AdamWParamState>(
      "AdamW", param_groups_, state_,
      [&](const auto& o, const internal::FusedBatch& batch,
          const auto& averages, const auto& squares, const auto& maxima,
          const auto& steps) {
        const auto [beta1, beta2] = o.betas();
        at::_fused_adamw_(batch.parameters, batch.gradients, averages, squares,
                          maxima, steps, o.lr(), beta1, beta2, o.weight_decay(),
                          o.eps(), o.amsgrad(), maximize_);
      });
  return loss;
}

}  // namespace lockstep::optim
