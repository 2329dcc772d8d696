#include "lockstep/parallel/checkpointing/input_versions.h"

#include <cstddef>
#include <stdexcept>
#include <string>

#include "lockstep/parallel/checkpointing/checkpoint_options.h"

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

ParameterVersions::ParameterVersions(const torch::nn::Module* module)
    : module_(module) {
  if (module_ == nullptr) return;
  for (const auto& parameter : module_->parameters()) {
    versions_.push_back(parameter._version());
  }
}

void ParameterVersions::require_unchanged() const {
  if (module_ == nullptr) return;
  const auto parameters = module_->named_parameters();
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (parameters[i].value()._version() == versions_[i]) continue;
    throw CheckpointError(
        "checkpoint: a recomputation has written parameter '" +
        parameters[i].key() +
        "', which forward had written before; write it outside of the "
        "checkpointed part");
  }
}

}  // namespace lockstep::internal
