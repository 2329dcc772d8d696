#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// The arguments of classification metrics.
namespace lockstep::internal {

// Throws std::invalid_argument, naming `metric`, unless `scores` is
// [..., classes] of a floating dtype with at least `least` classes, and
// `target` is [...] of integers on the same device. Returns the number of
// classes.
int64_t check_scores(const char* metric, const at::Tensor& scores,
                     const at::Tensor& target, int64_t least = 1);

// Returns whether `predicted` has labels like `target`, and not scores.
bool has_labels(const at::Tensor& predicted, const at::Tensor& target);

// Throws std::invalid_argument unless both are integers of the same shape on
// the same device.
void check_labels(const char* metric, const at::Tensor& predicted,
                  const at::Tensor& target);

// Throws std::invalid_argument: `count` labels of all ranks are not classes.
[[noreturn]] void refuse_labels(const char* metric, double count,
                                const char* allowed, int64_t ignore_index);

}  // namespace lockstep::internal
