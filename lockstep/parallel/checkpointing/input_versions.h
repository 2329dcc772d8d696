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

// Finds out whether a recomputation writes parameters of the function: forward
// has written them before.
class ParameterVersions {
 public:
  // `module`: null if the function is not a module; its parameters are the
  // `leaves` then.
  ParameterVersions(const torch::nn::Module* module,
                    std::vector<at::Tensor> leaves);
  // Throws CheckpointError.
  void require_unchanged() const;

 private:
  const torch::nn::Module* module_;
  std::vector<at::Tensor> parameters_;
  std::vector<int64_t> versions_;
};

// Returns the leaves from which `results` were computed by operations that this
// thread has recorded since its sequence number was `since`.
std::vector<at::Tensor> leaves_since(const std::vector<at::Tensor>& results,
                                     uint64_t since);

}  // namespace lockstep::internal
