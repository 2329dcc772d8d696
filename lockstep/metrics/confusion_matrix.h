#pragma once

#include "lockstep/metrics/metric.h"

namespace lockstep::metrics {

struct ConfusionMatrixOptions {
  // 1 or more. Required.
  int64_t num_classes{0};

  // Samples with this target do not count.
  int64_t ignore_index{-100};

  // As MetricOptions::group.
  ProcessGroupPtr group{};
};

// How often each class was taken for each other one. It has num_classes^2 sums,
// which compute() sends. metric.h says what holds for all metrics.
class ConfusionMatrix final : public Metric {
 public:
  // Throws std::invalid_argument unless num_classes is from 1 to 30000.
  explicit ConfusionMatrix(const ConfusionMatrixOptions& options);

  // `predicted`: scores [..., num_classes] of a floating dtype, of which the
  // highest counts, or labels [...] of integers. `target`: [...], integers.
  void update(const at::Tensor& predicted, const at::Tensor& target);

  // Returns the counts: int64 [num_classes, num_classes] on the CPU; the row is
  // the target, the column the prediction. Collective. Throws
  // std::invalid_argument if a target or label was not a class.
  at::Tensor compute() const;

 private:
  ConfusionMatrixOptions options_;
};

}  // namespace lockstep::metrics
