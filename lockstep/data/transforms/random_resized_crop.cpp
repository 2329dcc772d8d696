#include "lockstep/data/transforms/random_resized_crop.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "lockstep/data/transforms/image_size.h"

namespace lockstep {
namespace {

void check_crop_range(const std::array<double, 2>& range, const char* name) {
  if (range[0] > 0 && range[0] <= range[1] && std::isfinite(range[1])) return;
  throw std::invalid_argument(
      std::string("RandomResizedCrop: ") + name + " is {" +
      std::to_string(range[0]) + ", " + std::to_string(range[1]) +
      "}; give two numbers above 0, the smaller one first");
}

struct CropPlace {
  int64_t top = 0;
  int64_t left = 0;
  internal::ImageSize size;
};

CropPlace random_place(internal::ImageSize image,
                       const RandomResizedCropOptions& options,
                       SampleRandom& random) {
  const auto area =
      static_cast<double>(image.height) * static_cast<double>(image.width);
  // A drawn shape may not fit the image. After some attempts the largest part
  // of the middle is taken that has an allowed shape.
  constexpr int kAttempts = 10;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const double part =
        area * random.uniform(options.scale[0], options.scale[1]);
    const double ratio = std::exp(
        random.uniform(std::log(options.ratio[0]), std::log(options.ratio[1])));
    const double width = std::nearbyint(std::sqrt(part * ratio));
    const double height = std::nearbyint(std::sqrt(part / ratio));
    if (width < 1 || width > static_cast<double>(image.width) || height < 1 ||
        height > static_cast<double>(image.height)) {
      continue;
    }
    const internal::ImageSize size{static_cast<int64_t>(height),
                                   static_cast<int64_t>(width)};
    const int64_t top = random.integer(0, image.height - size.height + 1);
    const int64_t left = random.integer(0, image.width - size.width + 1);
    return {top, left, size};
  }
  const double ratio =
      static_cast<double>(image.width) / static_cast<double>(image.height);
  internal::ImageSize size = image;
  const auto rounded = [](double length) {
    return std::max<int64_t>(static_cast<int64_t>(std::nearbyint(length)), 1);
  };
  if (ratio < options.ratio[0]) {
    size.height = rounded(static_cast<double>(image.width) / options.ratio[0]);
  } else if (ratio > options.ratio[1]) {
    size.width = rounded(static_cast<double>(image.height) * options.ratio[1]);
  }
  return {(image.height - size.height) / 2, (image.width - size.width) / 2,
          size};
}

Resize resize_crops(int64_t height, int64_t width, bool antialias) {
  internal::check_target_size(height, width, "RandomResizedCrop");
  return {height, width, {.antialias = antialias}};
}

}  // namespace

RandomResizedCrop::RandomResizedCrop(int64_t height, int64_t width,
                                     RandomResizedCropOptions options)
    : options_(options),
      resize_(resize_crops(height, width, options.antialias)) {
  check_crop_range(options.scale, "scale");
  check_crop_range(options.ratio, "ratio");
}

at::Tensor RandomResizedCrop::operator()(const at::Tensor& image,
                                         SampleRandom& random) const {
  const CropPlace place = random_place(
      internal::image_size(image, "RandomResizedCrop"), options_, random);
  return resize_(internal::crop(image, place.top, place.left, place.size));
}

}  // namespace lockstep
