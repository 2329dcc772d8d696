#include "lockstep/data/transforms/center_crop.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>

#include "lockstep/data/transforms/image_size.h"

namespace lockstep {
namespace {

// Halves, and rounds a half to the even number, as Python's round().
int64_t half(int64_t length) {
  return static_cast<int64_t>(std::nearbyint(static_cast<double>(length) / 2));
}

}  // namespace

CenterCrop::CenterCrop(int64_t height, int64_t width)
    : height_(height), width_(width) {
  internal::check_target_size(height, width, "CenterCrop");
}

at::Tensor CenterCrop::operator()(const at::Tensor& image) const {
  auto [height, width] = internal::image_size(image, "CenterCrop");
  at::Tensor padded = image;
  if (height < height_ || width < width_) {
    const int64_t down = std::max<int64_t>(height_ - height, 0);
    const int64_t right = std::max<int64_t>(width_ - width, 0);
    // An odd border is wider on the right and below.
    padded = at::constant_pad_nd(
        image, {right / 2, (right + 1) / 2, down / 2, (down + 1) / 2}, 0);
    height += down;
    width += right;
  }
  return internal::crop(padded, half(height - height_), half(width - width_),
                        {height_, width_});
}

}  // namespace lockstep
