#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/base/required.h"
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

struct PerplexityOptions {
  // Tokens with this target do not count, as in torch.nn.CrossEntropyLoss.
  int64_t ignore_index{-100};

  // As MetricOptions::group.
  ProcessGroupPtr group{};
};

// The perplexity of a language model: the exponential of the mean negative
// log-likelihood (natural logarithm) of the tokens. metric.h says what holds
// for all metrics.
class Perplexity final : public Metric {
 public:
  explicit Perplexity(const PerplexityOptions& options = {});

  // `logits`: [..., classes] of a floating dtype, not normalised; 16-bit types
  // are computed in float32. `target`: [...], integers.
  void update(const at::Tensor& logits, const at::Tensor& target);
  // Takes the mean negative log-likelihood of `tokens` tokens, such as the loss
  // of cross_entropy, and the number of those that count; this is quicker if
  // the loss was computed already. `loss` has one element. 0 tokens leave it
  // out.
  void update(const at::Tensor& loss, int64_t tokens);

  // Returns a number of 1 or more. Collective. Throws std::invalid_argument if
  // a target, compared with logits, was not a class.
  double compute() const;

 private:
  PerplexityOptions options_;
};

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

struct ConfusionMatrixOptions {
  // From 1 to 30000.
  Required<int64_t> num_classes;

  // Samples with this target do not count.
  int64_t ignore_index{-100};

  // As MetricOptions::group.
  ProcessGroupPtr group{};
};

// How often each class was taken for each other one. It has num_classes^2 sums,
// which compute() sends. metric.h says what holds for all metrics.
class ConfusionMatrix final : public Metric {
 public:
  // Throws std::invalid_argument if num_classes is out of range.
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
