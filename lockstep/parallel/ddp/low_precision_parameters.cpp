#include "lockstep/parallel/ddp/low_precision_parameters.h"

#include <ATen/ATen.h>

namespace lockstep::internal {

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

void LowPrecisionParameters::lower(bool casts) {
  if (depth_ == 0) {
    const at::NoGradGuard no_grad;
    for (auto& [parameter, master, low] : parameters_) {
      master = parameter.variable_data();
      if (casts) low.copy_(master);
      parameter.set_data(low);
    }
  }
  ++depth_;
}

void LowPrecisionParameters::restore() {
  if (--depth_ > 0) return;
  for (auto& [parameter, master, low] : parameters_) parameter.set_data(master);
}

at::Tensor cast_floating(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype)
                                                        : tensor;
}

}  // namespace lockstep::internal
