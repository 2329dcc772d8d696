#include "lockstep/metrics/metrics.h"

#include <ATen/core/grad_mode.h>

#include <cmath>
#include <sstream>
#include <stdexcept>

namespace lockstep::metrics {
namespace {

// LibTorch has hardly any operation on the wider unsigned types.
bool is_integer(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) &&
         !at::isBarebonesUnsignedType(tensor.scalar_type());
}

[[noreturn]] void refuse(const char* metric, const at::Tensor& first,
                         const at::Tensor& target, const char* allowed) {
  std::ostringstream text;
  text << metric << ": got " << first.scalar_type() << " " << first.sizes()
       << " on " << first.device() << " and targets " << target.scalar_type()
       << " " << target.sizes() << " on " << target.device() << "; " << allowed;
  throw std::invalid_argument(text.str());
}

// Throws std::invalid_argument, naming `metric`, unless `scores` is
// [..., classes] of a floating dtype with at least `least` classes, and
// `target` is [...] of integers on the same device. Returns the number of
// classes.
int64_t check_scores(const char* metric, const at::Tensor& scores,
                     const at::Tensor& target, int64_t least = 1) {
  if (!at::isFloatingType(scores.scalar_type()) || !is_integer(target) ||
      scores.dim() != target.dim() + 1 || scores.device() != target.device() ||
      scores.sizes().slice(0, scores.dim() - 1) != target.sizes()) {
    refuse(metric, scores, target,
           "give scores [..., classes] of a floating dtype and targets [...] "
           "of signed integers or bytes, on one device");
  }
  const int64_t classes = scores.size(-1);
  if (classes < least) {
    throw std::invalid_argument(
        std::string(metric) + ": the scores have " + std::to_string(classes) +
        " classes, at least " + std::to_string(least) + " are needed");
  }
  return classes;
}

// Returns whether `predicted` has labels like `target`, and not scores.
bool has_labels(const at::Tensor& predicted, const at::Tensor& target) {
  return is_integer(predicted) && predicted.dim() == target.dim();
}

// Throws std::invalid_argument unless both are integers of the same shape on
// the same device.
void check_labels(const char* metric, const at::Tensor& predicted,
                  const at::Tensor& target) {
  if (is_integer(predicted) && is_integer(target) &&
      predicted.sizes() == target.sizes() &&
      predicted.device() == target.device()) {
    return;
  }
  refuse(metric, predicted, target,
         "give labels and targets of signed integers or bytes, of one shape "
         "and on one device");
}

// Throws std::invalid_argument: `count` labels of all ranks are not classes.
[[noreturn]] void refuse_labels(const char* metric, double count,
                                const char* allowed, int64_t ignore_index) {
  throw std::invalid_argument(
      std::string(metric) + ": " + std::to_string(static_cast<int64_t>(count)) +
      " labels, counted over all ranks, are " + allowed +
      "; a sample that should not count has the target " +
      std::to_string(ignore_index) + " (ignore_index)");
}

}  // namespace

Mean::Mean(const MetricOptions& options)
    : Metric("metrics::Mean::compute()", "Mean", 2, options.group) {}

void Mean::update(double value, double weight) {
  if (weight == 0) return;
  add(0, value * weight);
  add(1, weight);
}

void Mean::update(const at::Tensor& values, double weight) {
  require_real("Mean", values);
  if (weight == 0) return;
  const at::NoGradGuard no_grad;
  add(0, values.sum(at::kDouble) * weight);
  add(1, weight * static_cast<double>(values.numel()));
}

void Mean::update(const at::Tensor& values, const at::Tensor& weights) {
  require_real("Mean", values);
  require_real("Mean", weights);
  const at::NoGradGuard no_grad;
  if (!at::is_expandable_to(weights.sizes(), values.sizes())) {
    std::ostringstream text;
    text << "Mean: the values have the shape " << values.sizes()
         << ", the weights " << weights.sizes()
         << "; give a weight for each value";
    throw std::invalid_argument(text.str());
  }
  const at::Tensor expanded =
      weights.to(values.device(), at::kDouble).expand(values.sizes());
  const at::Tensor products = values.to(at::kDouble) * expanded;
  add(0, products.masked_fill(expanded == 0, 0).sum());
  add(1, expanded.sum());
}

double Mean::compute() const {
  const at::Tensor sums = reduce();
  const auto* numbers = sums.const_data_ptr<double>();
  return numbers[0] / numbers[1];
}

Sum::Sum(const MetricOptions& options)
    : Metric("metrics::Sum::compute()", "Sum", 1, options.group) {}

void Sum::update(double value) { add(0, value); }

void Sum::update(const at::Tensor& values) {
  require_real("Sum", values);
  const at::NoGradGuard no_grad;
  add(0, values.sum(at::kDouble));
}

double Sum::compute() const { return reduce()[0].item<double>(); }

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
  const int64_t classes = check_scores("Perplexity", logits, target);
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
    refuse_labels("Perplexity", numbers[kNoToken],
                  "not from 0 to the number of logits", options_.ignore_index);
  }
  return std::exp(-numbers[kLogLikelihood] / numbers[kTokens]);
}

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
  if (has_labels(predicted, target) && options_.top_k == 1) {
    check_labels("Accuracy", predicted, target);
    right = predicted == labels;
  } else {
    const int64_t classes =
        check_scores("Accuracy", predicted, target, options_.top_k);
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
    refuse_labels("Accuracy", numbers[kNoClass],
                  "not from 0 to the number of scores", options_.ignore_index);
  }
  return numbers[kRight] / numbers[kSamples];
}

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
  if (has_labels(predicted, target)) {
    check_labels("ConfusionMatrix", predicted, target);
  } else {
    const int64_t given = check_scores("ConfusionMatrix", predicted, target);
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
    refuse_labels("ConfusionMatrix", refused, "not from 0 to num_classes",
                  options_.ignore_index);
  }
  return sums.narrow(0, 0, classes * classes)
      .to(at::kLong)
      .view({classes, classes});
}

}  // namespace lockstep::metrics
