#include "lockstep/metrics/perplexity.h"

#include <ATen/core/grad_mode.h>

#include <cmath>
#include <stdexcept>

#include "lockstep/metrics/class_scores.h"

namespace lockstep::metrics {
namespace {

// The sums.
constexpr int64_t kLogLikelihood = 0;
constexpr int64_t kTokens = 1;
constexpr int64_t kNoToken = 2;

}  // namespace

Perplexity::Perplexity(const PerplexityOptions& options)
    : Metric("metrics::Perplexity::compute()", "Perplexity", 3, options.group),
      options_(options) {}

void Perplexity::update(const at::Tensor& logits, const at::Tensor& target) {
  const at::NoGradGuard no_grad;
  const int64_t classes = internal::check_scores("Perplexity", logits, target);
  // In a narrow dtype ignore_index and the number of classes would wrap.
  const at::Tensor tokens = target.to(at::kLong);
  const at::Tensor counts = tokens != options_.ignore_index;
  const at::Tensor place = tokens.clamp(0, classes - 1);
  const bool wide = logits.scalar_type() == at::kDouble;
  const at::Tensor likelihoods =
      logits.detach()
          .log_softmax(-1, wide ? at::kDouble : at::kFloat)
          .gather(-1, place.unsqueeze(-1))
          .squeeze(-1);
  add(kLogLikelihood,
      likelihoods.masked_fill(counts.logical_not(), 0).sum(at::kDouble));
  add(kTokens, counts.sum());
  add(kNoToken, (counts & ((tokens < 0) | (tokens >= classes))).sum());
}

void Perplexity::update(const at::Tensor& loss, int64_t tokens) {
  if (loss.numel() != 1 || tokens < 0) {
    throw std::invalid_argument(
        "Perplexity: the loss has " + std::to_string(loss.numel()) +
        " elements, for " + std::to_string(tokens) +
        " tokens; give the mean over at least 0 tokens");
  }
  // The mean over no tokens is NaN.
  if (tokens == 0) return;
  const at::NoGradGuard no_grad;
  add(kLogLikelihood,
      loss.detach().squeeze().to(at::kDouble) * -static_cast<double>(tokens));
  add(kTokens, static_cast<double>(tokens));
}

double Perplexity::compute() const {
  const at::Tensor sums = reduce();
  const auto* numbers = sums.const_data_ptr<double>();
  if (numbers[kNoToken] > 0) {
    internal::refuse_labels("Perplexity", numbers[kNoToken],
                            "not from 0 to the number of logits",
                            options_.ignore_index);
  }
  return std::exp(-numbers[kLogLikelihood] / numbers[kTokens]);
}

}  // namespace lockstep::metrics
