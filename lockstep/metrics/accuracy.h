#pragma once

#include "lockstep/metrics/metric.h"

namespace lockstep::metrics {

struct AccuracyOptions {
  // A sample is right if its target is among the classes with the top_k highest
  // scores; 1 or more. Among equal scores at::topk() chooses.
  int64_t top_k{1};

  // Samples with this target do not count, as in torch.nn.CrossEntropyLoss.
  int64_t ignore_index{-100};

  // As MetricOptions::group.
  ProcessGroupPtr group{};
};

// The part of samples that were classified right. metric.h says what holds for
// all metrics.
class Accuracy final : public Metric {
 public:
  // Throws std::invalid_argument if top_k is below 1.
  explicit Accuracy(const AccuracyOptions& options = {});

  // `predicted`: scores (logits or probabilities) [..., classes] of a floating
  // dtype; or, for top_k = 1, labels [...] of integers. `target`: [...],
  // integers.
  void update(const at::Tensor& predicted, const at::Tensor& target);

  // Returns a number from 0 to 1. Collective. Throws std::invalid_argument if a
  // target, compared with scores, was not a class.
  double compute() const;

 private:
  AccuracyOptions options_;
};

}  // namespace lockstep::metrics
