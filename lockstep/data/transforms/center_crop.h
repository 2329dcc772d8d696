#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep {

// Cuts out the middle of images [..., H, W] of any dtype, as torchvision's
// CenterCrop: an image that is smaller gets a border of zeros before. The
// result may share the input's memory, which is not changed. Any thread may
// call.
class CenterCrop {
 public:
  // Throws std::invalid_argument if a size is less than 1.
  explicit CenterCrop(int64_t size) : CenterCrop(size, size) {}
  CenterCrop(int64_t height, int64_t width);

  at::Tensor operator()(const at::Tensor& image) const;

 private:
  int64_t height_;
  int64_t width_;
};

}  // namespace lockstep
