#include "lockstep/data/transforms/random_crop.h"

#include <stdexcept>
#include <string>

#include "lockstep/data/transforms/image_size.h"

namespace lockstep {

RandomCrop::RandomCrop(int64_t height, int64_t width, RandomCropOptions options)
    : height_(height), width_(width), options_(options) {
  internal::check_target_size(height, width, "RandomCrop");
  if (options.padding < 0) {
    throw std::invalid_argument("RandomCrop: padding is " +
                                std::to_string(options.padding) +
                                "; it must be 0 or more");
  }
}

at::Tensor RandomCrop::operator()(const at::Tensor& image,
                                  SampleRandom& random) const {
  internal::image_size(image, "RandomCrop");
  at::Tensor padded =
      internal::pad(image, options_.padding, options_.padding, options_.fill);
  if (options_.pad_if_needed && padded.size(-1) < width_) {
    padded = internal::pad(padded, width_ - padded.size(-1), 0, options_.fill);
  }
  if (options_.pad_if_needed && padded.size(-2) < height_) {
    padded = internal::pad(padded, 0, height_ - padded.size(-2), options_.fill);
  }
  const int64_t places_down = padded.size(-2) - height_ + 1;
  const int64_t places_right = padded.size(-1) - width_ + 1;
  if (places_down < 1 || places_right < 1) {
    throw std::invalid_argument(
        "RandomCrop: " + std::to_string(height_) + " x " +
        std::to_string(width_) +
        " pixels (height x width) cannot be cut out of " +
        std::to_string(padded.size(-2)) + " x " +
        std::to_string(padded.size(-1)) +
        ", with padding; set pad_if_needed, or resize before");
  }
  const int64_t top = random.integer(0, places_down);
  const int64_t left = random.integer(0, places_right);
  return internal::crop(padded, top, left, {height_, width_});
}

}  // namespace lockstep
