#include "lockstep/data/transforms.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <limits>
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

namespace lockstep {

at::Tensor ToFloat::operator()(const at::Tensor& tensor) const {
  if (tensor.scalar_type() == at::kByte) return tensor.to(at::kFloat).div_(255);
  if (!tensor.is_floating_point()) {
    throw std::invalid_argument(
        std::string("ToFloat: the tensor is ") +
        c10::toString(tensor.scalar_type()) +
        "; uint8 and floating-point types are allowed; convert others with "
        "to(torch::kFloat)");
  }
  return tensor.to(at::kFloat);
}

namespace {

at::Tensor per_channel(const std::vector<double>& values) {
  return at::from_blob(const_cast<double*>(values.data()),
                       {static_cast<int64_t>(values.size()), 1, 1},
                       at::TensorOptions(at::kDouble).device(at::kCPU))
      .clone();
}

}  // namespace

Normalize::Normalize(const std::vector<double>& mean,
                     const std::vector<double>& deviation) {
  if (mean.empty() || mean.size() != deviation.size()) {
    throw std::invalid_argument(
        "Normalize: there are " + std::to_string(mean.size()) + " means and " +
        std::to_string(deviation.size()) +
        " deviations; give one of both for each channel");
  }
  if (std::count(deviation.begin(), deviation.end(), 0.0) > 0) {
    throw std::invalid_argument(
        "Normalize: a deviation is 0, and nothing can be divided by it");
  }
  mean_ = per_channel(mean);
  deviation_ = per_channel(deviation);
}

at::Tensor Normalize::operator()(const at::Tensor& image) const {
  if (!image.is_floating_point()) {
    throw std::invalid_argument(
        std::string("Normalize: the image is ") +
        c10::toString(image.scalar_type()) +
        "; a floating-point type is needed: use ToFloat before");
  }
  const int64_t channels = mean_.size(0);
  if (image.dim() < 3 || (channels != 1 && image.size(-3) != channels)) {
    throw std::invalid_argument(
        "Normalize: the image has " +
        (image.dim() < 3 ? std::to_string(image.dim()) + " dimensions"
                         : std::to_string(image.size(-3)) + " channels") +
        "; with " + std::to_string(channels) +
        " means it must be [..., channels, height, width] with as many "
        "channels");
  }
  // Both are rounded to the image's dtype first, as torchvision does.
  const auto as_image = [&](const at::Tensor& values) {
    return values.to(image.device(), image.scalar_type());
  };
  return (image - as_image(mean_)).div_(as_image(deviation_));
}

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

RandomHorizontalFlip::RandomHorizontalFlip(double probability)
    : probability_(probability) {
  if (!(probability >= 0 && probability <= 1)) {
    throw std::invalid_argument("RandomHorizontalFlip: the probability is " +
                                std::to_string(probability) +
                                "; it must be in [0, 1]");
  }
}

at::Tensor RandomHorizontalFlip::operator()(const at::Tensor& image,
                                            SampleRandom& random) const {
  internal::image_size(image, "RandomHorizontalFlip");
  return random.chance(probability_) ? image.flip({-1}) : image;
}

}  // namespace lockstep
