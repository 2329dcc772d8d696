#include "lockstep/parallel/checkpointing/input_versions.h"

#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/comm/version_of.h"
#include "lockstep/parallel/checkpointing/checkpoint_options.h"
#include "lockstep/parallel/fsdp/graph_leaves.h"

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

ParameterVersions::ParameterVersions(const torch::nn::Module* module,
                                     std::vector<at::Tensor> leaves)
    : module_(module),
      parameters_(module == nullptr ? std::move(leaves)
                                    : module->parameters()) {
  for (const auto& parameter : parameters_) {
    versions_.push_back(version_of(parameter));
  }
}

void ParameterVersions::require_unchanged() const {
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (version_of(parameters_[i]) == versions_[i]) continue;
    throw CheckpointError(
        c10::str("checkpoint: a recomputation has written ",
                 module_ == nullptr
                     ? c10::str("a parameter of shape ", parameters_[i].sizes())
                     : c10::str("parameter '",
                                module_->named_parameters()[i].key(), "'"),
                 ", which forward had written before; write it outside of the "
                 "checkpointed part"));
  }
}

std::vector<at::Tensor> leaves_since(const std::vector<at::Tensor>& results,
                                     uint64_t since) {
  const auto thread = at::RecordFunction::currentThreadId();
  return graph_leaves(results, [&](const torch::autograd::Node& node) {
    return node.sequence_nr() == UINT64_MAX ||  // a leaf
           (node.thread_id() == thread && node.sequence_nr() >= since);
  });
}

}  // namespace lockstep::internal
