#pragma once

#include "lockstep/metrics/metric.h"

namespace lockstep::metrics {

// The mean of numbers, with weights:
//
//   metrics::Mean loss;
//   loss.update(batch_loss, batch.size(0));  // a mean over the batch
//
// metric.h says what holds for all metrics.
class Mean final : public Metric {
 public:
  explicit Mean(const MetricOptions& options = {});

  // Each element of `values` has the weight `weight`. A weight of 0 leaves the
  // values out, even if they are NaN.
  void update(double value, double weight = 1);
  void update(const at::Tensor& values, double weight = 1);
  // Each element has a weight of its own. `weights` has the shape of `values`,
  // or one that can be expanded to it.
  void update(const at::Tensor& values, const at::Tensor& weights);

  // Returns the sum of weight * value over the sum of weights. Collective.
  double compute() const;
};

}  // namespace lockstep::metrics
