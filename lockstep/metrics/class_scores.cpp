#include "lockstep/metrics/class_scores.h"

#include <sstream>
#include <stdexcept>

namespace lockstep::internal {
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

}  // namespace

int64_t check_scores(const char* metric, const at::Tensor& scores,
                     const at::Tensor& target, int64_t least) {
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

bool has_labels(const at::Tensor& predicted, const at::Tensor& target) {
  return is_integer(predicted) && predicted.dim() == target.dim();
}

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

void refuse_labels(const char* metric, double count, const char* allowed,
                   int64_t ignore_index) {
  throw std::invalid_argument(
      std::string(metric) + ": " + std::to_string(static_cast<int64_t>(count)) +
      " labels, counted over all ranks, are " + allowed +
      "; a sample that should not count has the target " +
      std::to_string(ignore_index) + " (ignore_index)");
}

}  // namespace lockstep::internal
