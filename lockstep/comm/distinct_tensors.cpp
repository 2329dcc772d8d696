#include "lockstep/comm/distinct_tensors.h"

#include <unordered_set>

namespace lockstep {

std::vector<at::Tensor> distinct(std::vector<at::Tensor> tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(tensors, [&](const at::Tensor& tensor) {
    return !seen.insert(tensor.unsafeGetTensorImpl()).second;
  });
  return tensors;
}

}  // namespace lockstep
