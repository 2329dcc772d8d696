#include "lockstep/metrics/accuracy.h"

#include <ATen/core/grad_mode.h>

#include <stdexcept>

#include "lockstep/metrics/class_scores.h"

namespace lockstep::metrics {
namespace {

// The sums.
constexpr int64_t kRight = 0;
constexpr int64_t kSamples = 1;
constexpr int64_t kNoClass = 2;

}  // namespace

Accuracy::Accuracy(const AccuracyOptions& options)
    : Metric("metrics::Accuracy::compute()",
             "Accuracy(top_k=" + std::to_string(options.top_k) + ")", 3,
             options.group),
      options_(options) {
  if (options_.top_k < 1) {
    throw std::invalid_argument("Accuracy: top_k is " +
                                std::to_string(options_.top_k) +
                                "; give a number of at least 1");
  }
}

void Accuracy::update(const at::Tensor& predicted, const at::Tensor& target) {
  const at::NoGradGuard no_grad;
  // In a narrow dtype ignore_index and the number of classes would wrap.
  const at::Tensor labels = target.to(at::kLong);
  const at::Tensor counts = labels != options_.ignore_index;
  at::Tensor right;
  if (internal::has_labels(predicted, target) && options_.top_k == 1) {
    internal::check_labels("Accuracy", predicted, target);
    right = predicted == labels;
  } else {
    const int64_t classes =
        internal::check_scores("Accuracy", predicted, target, options_.top_k);
    const at::Tensor best =
        std::get<1>(predicted.detach().topk(options_.top_k, -1));
    right = (best == labels.unsqueeze(-1)).any(-1);
    add(kNoClass, (counts & ((labels < 0) | (labels >= classes))).sum());
  }
  add(kRight, (right & counts).sum());
  add(kSamples, counts.sum());
}

double Accuracy::compute() const {
  const at::Tensor sums = reduce();
  const auto* numbers = sums.const_data_ptr<double>();
  if (numbers[kNoClass] > 0) {
    internal::refuse_labels("Accuracy", numbers[kNoClass],
                            "not from 0 to the number of scores",
                            options_.ignore_index);
  }
  return numbers[kRight] / numbers[kSamples];
}

}  // namespace lockstep::metrics
