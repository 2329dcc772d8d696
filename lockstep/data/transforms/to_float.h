#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

// Converts to float32: uint8 from [0, 255] to [0, 1], as torchvision's ToTensor
// does; floating-point numbers keep their value. Any shape, any thread.
class ToFloat {
 public:
  // Throws std::invalid_argument for other integers and bools: their range is
  // not known.
  at::Tensor operator()(const at::Tensor& tensor) const;
};

}  // namespace lockstep
