#include "lockstep/data/transforms/image_size.h"

#include <ATen/Functions.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace lockstep::internal {

ImageSize image_size(const at::Tensor& image, const char* transform) {
  if (!image.defined() || image.dim() < 2 || image.numel() == 0) {
    std::ostringstream text;
    text << transform << ": the image is ";
    if (image.defined()) {
      text << "a tensor of size " << image.sizes();
    } else {
      text << "an undefined tensor";
    }
    throw std::invalid_argument(text.str() +
                                "; give [..., height, width], each 1 or more");
  }
  return {image.size(-2), image.size(-1)};
}

void check_target_size(int64_t height, int64_t width, const char* transform) {
  if (height < 1 || width < 1) {
    throw std::invalid_argument(std::string(transform) + ": the size is " +
                                std::to_string(height) + " x " +
                                std::to_string(width) +
                                " (height x width); both must be 1 or more");
  }
}

at::Tensor crop(const at::Tensor& image, int64_t top, int64_t left,
                ImageSize size) {
  return image.narrow(-2, top, size.height).narrow(-1, left, size.width);
}

at::Tensor pad(const at::Tensor& image, int64_t horizontal, int64_t vertical,
               double value) {
  if (horizontal == 0 && vertical == 0) return image;
  return at::constant_pad_nd(
      image, {horizontal, horizontal, vertical, vertical}, value);
}

}  // namespace lockstep::internal
