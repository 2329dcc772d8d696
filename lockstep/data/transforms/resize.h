#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep {

struct ResizeOptions {
  // Whether to average over all pixels that become one when an image gets
  // smaller, as Pillow does.
  bool antialias{true};
};

// Resizes images [H, W], [C, H, W] or [B, C, H, W], uint8 or floating-point, by
// bilinear interpolation: torch.nn.functional.interpolate(mode="bilinear",
// align_corners=False), with the same result for the same dtype. The input is
// not changed. Any thread may call.
class Resize {
 public:
  // Makes the shorter side this long and keeps the proportions; the longer side
  // is rounded down (torchvision's Resize with one number). Throws
  // std::invalid_argument if it is less than 1.
  explicit Resize(int64_t shorter_side, ResizeOptions options = {});

  // Makes the image exactly this large.
  Resize(int64_t height, int64_t width, ResizeOptions options = {});

  // Throws std::invalid_argument if it is not an image of these kinds.
  at::Tensor operator()(const at::Tensor& image) const;

 private:
  int64_t height_;  // or the shorter side, if width_ is 0
  int64_t width_;
  ResizeOptions options_;
};

}  // namespace lockstep
