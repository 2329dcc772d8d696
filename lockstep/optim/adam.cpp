#include "lockstep/optim/adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <memory>
#include <utility>

#include "lockstep/optim/fused_step.h"

namespace lockstep::optim {

template <class TorchOptions>
torch::optim::OptimizerParamGroup AdamLikeGroup<TorchOptions>::to_torch(
    const TorchOptions& defaults) const {
  auto options =
      std::make_unique<internal::MeantOptions<TorchOptions>>(defaults);
  if (lr) options->lr(*lr);
  if (betas) options->betas(*betas);
  if (eps) options->eps(*eps);
  if (weight_decay) options->weight_decay(*weight_decay);
  if (amsgrad) options->amsgrad(*amsgrad);
  return {params, std::move(options)};
}

template struct AdamLikeGroup<torch::optim::AdamOptions>;
template struct AdamLikeGroup<torch::optim::AdamWOptions>;

at::Tensor Adam::step(LossClosure closure) {
  return internal::step_adam<TorchOptions, torch::optim::AdamParamState>(
      closure, param_groups_, state_, maximize(),
      [](const auto&... arguments) { at::_fused_adam_(arguments...); });
}

at::Tensor AdamW::step(LossClosure closure) {
  return internal::step_adam<TorchOptions, torch::optim::AdamWParamState>(
      closure, param_groups_, state_, maximize(),
      [](const auto&... arguments) { at::_fused_adamw_(arguments...); });
}

}  // namespace lockstep::optim
