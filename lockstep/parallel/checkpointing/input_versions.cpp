#include "lockstep/parallel/checkpointing/input_versions.h"

#include <cstddef>
#include <stdexcept>
#include <string>

namespace lockstep::internal {

InputVersions::InputVersions(const std::vector<at::Tensor>& inputs) {
  for (const auto& input : inputs) versions_.push_back(input._version());
}

void InputVersions::require_unchanged(
    const std::vector<at::Tensor>& inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i]._version() == versions_[i]) continue;
    throw std::invalid_argument(
        "checkpoint: the function has changed tensor " + std::to_string(i + 1) +
        " of its arguments in place, so it would be recomputed from another "
        "value; use operations that are not in place, or give it a clone()");
  }
}

}  // namespace lockstep::internal
