#include "lockstep/data/transforms/normalize.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lockstep {
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

}  // namespace lockstep
