#pragma once

#include "lockstep/metrics/metric.h"

namespace lockstep::metrics {

// The sum of numbers. metric.h says what holds for all metrics.
class Sum final : public Metric {
 public:
  explicit Sum(const MetricOptions& options = {});

  // The elements of a tensor are added up.
  void update(double value);
  void update(const at::Tensor& values);

  // Collective.
  double compute() const;
};

}  // namespace lockstep::metrics
