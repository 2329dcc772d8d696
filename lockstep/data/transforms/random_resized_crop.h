#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "lockstep/data/sample_random.h"
#include "lockstep/data/transforms/resize.h"

namespace lockstep {

struct RandomResizedCropOptions {
  // The least and the largest part of the image's area that is cut out.
  std::array<double, 2> scale{0.08, 1.0};

  // The least and the largest width divided by height of what is cut out.
  std::array<double, 2> ratio{3.0 / 4, 4.0 / 3};

  // As in Resize.
  bool antialias{true};
};

// Cuts a part of random size and shape out of an image at a random place, and
// resizes it: torchvision's RandomResizedCrop (from Szegedy et al., "Going
// deeper with convolutions", 2014), with the same distribution. The images are
// those that Resize takes; the input is not changed. Any thread may call.
class RandomResizedCrop {
 public:
  // Throws std::invalid_argument if a size is less than 1, or a range is not
  // two numbers above 0 in their order.
  explicit RandomResizedCrop(int64_t size,
                             RandomResizedCropOptions options = {})
      : RandomResizedCrop(size, size, options) {}
  RandomResizedCrop(int64_t height, int64_t width,
                    RandomResizedCropOptions options = {});

  at::Tensor operator()(const at::Tensor& image, SampleRandom& random) const;

 private:
  RandomResizedCropOptions options_;
  Resize resize_;
};

}  // namespace lockstep
