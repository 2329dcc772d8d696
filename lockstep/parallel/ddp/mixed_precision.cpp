#include "lockstep/parallel/ddp/mixed_precision.h"

#include <ATen/ATen.h>

namespace lockstep {

LowPrecisionParameters::LowPrecisionParameters(
    const std::vector<at::Tensor>& parameters, at::ScalarType dtype) {
  for (const auto& parameter : parameters) {
    if (!parameter.is_floating_point() || parameter.scalar_type() == dtype) {
      continue;
    }
    parameters_.push_back(
        {parameter, {}, at::empty_like(parameter.variable_data(), dtype)});
  }
}

bool LowPrecisionParameters::lower() {
  if (is_low_) return false;
  at::NoGradGuard no_grad;
  for (auto& [parameter, master, low] : parameters_) {
    master = parameter.variable_data();
    low.copy_(master);
    parameter.set_data(low);
  }
  is_low_ = true;
  return true;
}

void LowPrecisionParameters::restore() {
  if (!is_low_) return;
  for (auto& [parameter, master, low] : parameters_) parameter.set_data(master);
  is_low_ = false;
}

at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype)
                                                        : tensor;
}

}  // namespace lockstep
