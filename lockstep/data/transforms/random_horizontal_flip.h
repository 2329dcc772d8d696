#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/data/sample_random.h"

namespace lockstep {

// Mirrors images [..., H, W] of any dtype, left to right, with a probability:
// torchvision's RandomHorizontalFlip. The input is not changed. Any thread may
// call.
class RandomHorizontalFlip {
 public:
  // Throws std::invalid_argument if the probability is not in [0, 1].
  explicit RandomHorizontalFlip(double probability = 0.5);

  at::Tensor operator()(const at::Tensor& image, SampleRandom& random) const;

 private:
  double probability_;
};

}  // namespace lockstep
