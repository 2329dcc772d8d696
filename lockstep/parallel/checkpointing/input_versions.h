#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

namespace lockstep::internal {

// Finds tensors that a call has changed in place. The recomputation would get
// them as they are after the call.
class InputVersions {
 public:
  explicit InputVersions(const std::vector<at::Tensor>& inputs);

  // Throws std::invalid_argument that names the first changed tensor.
  void require_unchanged(const std::vector<at::Tensor>& inputs) const;

 private:
  std::vector<int64_t> versions_;
};

// Finds out whether a recomputation writes parameters of the function, if that
// is a module: forward has written them before.
class ParameterVersions {
 public:
  // Null: the function is not a module.
  explicit ParameterVersions(const torch::nn::Module* module);
  // Throws CheckpointError.
  void require_unchanged() const;

 private:
  const torch::nn::Module* module_;
  std::vector<uint32_t> versions_;
};

}  // namespace lockstep::internal
