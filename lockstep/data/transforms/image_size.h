#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep::internal {

struct ImageSize {
  int64_t height = 0;
  int64_t width = 0;
};

// Returns the last two sizes. Throws std::invalid_argument that names
// `transform` if the tensor has fewer than two dimensions, or no pixel.
ImageSize image_size(const at::Tensor& image, const char* transform);

// Throws std::invalid_argument unless both are 1 or more.
void check_target_size(int64_t height, int64_t width, const char* transform);

// Returns a view of a part of the image. Requires that it lies inside.
at::Tensor crop(const at::Tensor& image, int64_t top, int64_t left,
                ImageSize size);

// Adds pixels of `value` on the left and right, and above and below.
at::Tensor pad(const at::Tensor& image, int64_t horizontal, int64_t vertical,
               double value);

}  // namespace lockstep::internal
