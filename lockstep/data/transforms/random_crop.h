#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/data/sample_random.h"

namespace lockstep {

struct RandomCropOptions {
  // Pixels that are added on each of the four sides before.
  int64_t padding{0};

  // Whether to add pixels to an image that is still too small: as many as it
  // lacks, on both sides. If not, such an image is an error.
  bool pad_if_needed{false};

  // The value of added pixels.
  double fill{0};
};

// Cuts a part out of images [..., H, W] of any dtype at a random place, each
// place equally likely, as torchvision's RandomCrop. The result may share the
// input's memory, which is not changed. Any thread may call.
class RandomCrop {
 public:
  // Throws std::invalid_argument if a size is less than 1, or padding less
  // than 0.
  explicit RandomCrop(int64_t size, RandomCropOptions options = {})
      : RandomCrop(size, size, options) {}
  RandomCrop(int64_t height, int64_t width, RandomCropOptions options = {});

  // Throws std::invalid_argument if the image is too small.
  at::Tensor operator()(const at::Tensor& image, SampleRandom& random) const;

 private:
  int64_t height_;
  int64_t width_;
  RandomCropOptions options_;
};

}  // namespace lockstep
