#include "lockstep/metrics/mean.h"

#include <ATen/core/grad_mode.h>

#include <sstream>
#include <stdexcept>

namespace lockstep::metrics {

Mean::Mean(const MetricOptions& options)
    : Metric("metrics::Mean::compute()", "Mean", 2, options.group) {}

void Mean::update(double value, double weight) {
  if (weight == 0) return;
  add(0, value * weight);
  add(1, weight);
}

void Mean::update(const at::Tensor& values, double weight) {
  require_real("Mean", values);
  if (weight == 0) return;
  const at::NoGradGuard no_grad;
  add(0, values.sum(at::kDouble) * weight);
  add(1, weight * static_cast<double>(values.numel()));
}

void Mean::update(const at::Tensor& values, const at::Tensor& weights) {
  require_real("Mean", values);
  require_real("Mean", weights);
  const at::NoGradGuard no_grad;
  if (!at::is_expandable_to(weights.sizes(), values.sizes())) {
    std::ostringstream text;
    text << "Mean: the values have the shape " << values.sizes()
         << ", the weights " << weights.sizes()
         << "; give a weight for each value";
    throw std::invalid_argument(text.str());
  }
  const at::Tensor expanded =
      weights.to(values.device(), at::kDouble).expand(values.sizes());
  const at::Tensor products = values.to(at::kDouble) * expanded;
  add(0, products.masked_fill(expanded == 0, 0).sum());
  add(1, expanded.sum());
}

double Mean::compute() const {
  const at::Tensor sums = reduce();
  const auto* numbers = sums.const_data_ptr<double>();
  return numbers[0] / numbers[1];
}

}  // namespace lockstep::metrics
