#include "lockstep/metrics/confusion_matrix.h"

#include <ATen/core/grad_mode.h>

#include <stdexcept>

#include "lockstep/metrics/class_scores.h"

namespace lockstep::metrics {
namespace {

// Throws unless the matrix fits memory.
int64_t checked_classes(int64_t classes) {
  if (classes >= 1 && classes <= 30000) return classes;
  throw std::invalid_argument("ConfusionMatrix: num_classes is " +
                              std::to_string(classes) +
                              "; give a number from 1 to 30000");
}

}  // namespace

// The last sum counts labels that are not classes.
ConfusionMatrix::ConfusionMatrix(const ConfusionMatrixOptions& options)
    : Metric("metrics::ConfusionMatrix::compute()",
             "ConfusionMatrix(num_classes=" +
                 std::to_string(options.num_classes) + ")",
             checked_classes(options.num_classes) * options.num_classes + 1,
             options.group),
      options_(options) {}

void ConfusionMatrix::update(const at::Tensor& predicted,
                             const at::Tensor& target) {
  const at::NoGradGuard no_grad;
  const int64_t classes = options_.num_classes;
  at::Tensor labels = predicted;
  if (internal::has_labels(predicted, target)) {
    internal::check_labels("ConfusionMatrix", predicted, target);
  } else {
    const int64_t given =
        internal::check_scores("ConfusionMatrix", predicted, target);
    if (given != classes) {
      throw std::invalid_argument(
          "ConfusionMatrix: the scores have " + std::to_string(given) +
          " classes, num_classes is " + std::to_string(classes));
    }
    labels = predicted.detach().argmax(-1);
  }
  labels = labels.to(at::kLong).flatten();
  const at::Tensor targets = target.to(at::kLong).flatten();
  const auto in_range = [&](const at::Tensor& values) {
    return (values >= 0) & (values < classes);
  };
  const at::Tensor counts = targets != options_.ignore_index;
  const at::Tensor valid = in_range(targets) & in_range(labels);
  // A label that is not a class has a place of its own, so no value is looked
  // at.
  const at::Tensor place =
      at::where(valid, targets * classes + labels, classes * classes);
  sums_on(targets.device()).index_add_(0, place, counts.to(at::kDouble));
}

at::Tensor ConfusionMatrix::compute() const {
  const at::Tensor sums = reduce();
  const int64_t classes = options_.num_classes;
  const double refused = sums[classes * classes].item<double>();
  if (refused > 0) {
    internal::refuse_labels("ConfusionMatrix", refused,
                            "not from 0 to num_classes", options_.ignore_index);
  }
  return sums.narrow(0, 0, classes * classes)
      .to(at::kLong)
      .view({classes, classes});
}

}  // namespace lockstep::metrics
