#include "lockstep/data/transforms/resize.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string>

#include "lockstep/data/transforms/image_size.h"

namespace lockstep {

Resize::Resize(int64_t shorter_side, ResizeOptions options)
    : height_(shorter_side), width_(0), options_(options) {
  internal::check_target_size(shorter_side, shorter_side, "Resize");
}

Resize::Resize(int64_t height, int64_t width, ResizeOptions options)
    : height_(height), width_(width), options_(options) {
  internal::check_target_size(height, width, "Resize");
}

at::Tensor Resize::operator()(const at::Tensor& image) const {
  const auto [height, width] = internal::image_size(image, "Resize");
  if (image.dim() > 4 ||
      (image.scalar_type() != at::kByte && !image.is_floating_point())) {
    throw std::invalid_argument(
        std::string("Resize: the image has ") + std::to_string(image.dim()) +
        " dimensions of " + c10::toString(image.scalar_type()) +
        "; two to four dimensions of uint8 or a floating-point type are "
        "allowed");
  }
  int64_t new_height = height_;
  int64_t new_width = width_;
  if (width_ == 0) {
    const int64_t shorter = std::min(height, width);
    const int64_t longer = std::max(height, width);
    if (longer > std::numeric_limits<int64_t>::max() / height_) {
      throw std::invalid_argument("Resize: the size " +
                                  std::to_string(height_) + " is too large");
    }
    const int64_t new_longer = height_ * longer / shorter;
    new_height = height <= width ? height_ : new_longer;
    new_width = height <= width ? new_longer : height_;
  }
  if (new_height == height && new_width == width) return image;
  at::Tensor batch = image;
  while (batch.dim() < 4) batch = batch.unsqueeze(0);
  const std::array<int64_t, 2> size{new_height, new_width};
  at::Tensor resized =
      options_.antialias
          ? at::_upsample_bilinear2d_aa(batch, size, /*align_corners=*/false)
          : at::upsample_bilinear2d(batch, size, /*align_corners=*/false);
  while (resized.dim() > image.dim()) resized = resized.squeeze(0);
  return resized;
}

}  // namespace lockstep
