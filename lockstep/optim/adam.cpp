#include "lockstep/optim/adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include "lockstep/optim/fused_step.h"

namespace lockstep {

template class internal::FusedOptimizer<internal::AdamTypes>;

at::Tensor optim::Adam::step(LossClosure closure) {
  return internal::step_adam<internal::AdamTypes>(
      closure, param_groups_, state_, maximize(),
      [](const auto&... arguments) { at::_fused_adam_(arguments...); });
}

template class internal::FusedOptimizer<internal::AdamWTypes>;

at::Tensor optim::AdamW::step(LossClosure closure) {
  return internal::step_adam<internal::AdamWTypes>(
      closure, param_groups_, state_, maximize(),
      [](const auto&... arguments) { at::_fused_adamw_(arguments...); });
}

}  // namespace lockstep
