#include "lockstep/data/transforms/to_float.h"

#include <stdexcept>
#include <string>

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

}  // namespace lockstep
