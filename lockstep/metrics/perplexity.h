#pragma once

#include "lockstep/metrics/metric.h"

namespace lockstep::metrics {

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

}  // namespace lockstep::metrics
