#include "lockstep/metrics/sum.h"

#include <ATen/core/grad_mode.h>

namespace lockstep::metrics {

Sum::Sum(const MetricOptions& options)
    : Metric("metrics::Sum::compute()", "Sum", 1, options.group) {}

void Sum::update(double value) { add(0, value); }

void Sum::update(const at::Tensor& values) {
  require_real("Sum", values);
  const at::NoGradGuard no_grad;
  add(0, values.sum(at::kDouble));
}

double Sum::compute() const { return reduce()[0].item<double>(); }

}  // namespace lockstep::metrics
