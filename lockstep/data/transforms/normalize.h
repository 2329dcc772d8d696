#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// Subtracts a mean from each channel of images [..., C, H, W] and divides by a
// standard deviation, in the image's floating-point dtype: torchvision's
// Normalize. The input is not changed. Any thread may call.
class Normalize {
 public:
  // One number for each channel, or one for all. Throws std::invalid_argument
  // if there are none, if the two lists differ in length, or if a deviation
  // is 0.
  Normalize(const std::vector<double>& mean,
            const std::vector<double>& deviation);

  // Throws std::invalid_argument if the image is not floating-point (use
  // ToFloat before), or has another number of channels.
  at::Tensor operator()(const at::Tensor& image) const;

 private:
  at::Tensor mean_;       // float64 [C, 1, 1]
  at::Tensor deviation_;  // the same
};

}  // namespace lockstep
