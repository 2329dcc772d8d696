#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/amp/autocast.h"

namespace lockstep::internal {

// The conditions, besides its arguments, that decide what a forward computes:
// the states of random generators, and autocast. Taken before the forward, so
// that a recomputation draws the same numbers in the same dtypes.
class ForwardConditions {
 public:
  // Takes the present conditions of this thread. `inputs`: the generators of
  // their accelerators are included, beside the default one of the CPU; those
  // of other devices are not. `generators`: whether any are. Throws
  // std::invalid_argument for generators in one of several CPU replicas of a
  // DataParallel.
  ForwardConditions(const std::vector<at::Tensor>& inputs, bool generators);

  // Restores the conditions in the thread that makes it, and at its end those
  // that were set before.
  class [[nodiscard]] Restored {
   public:
    explicit Restored(const ForwardConditions& conditions);
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;
    ~Restored();

   private:
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
    Autocast cpu_;
    std::optional<Autocast> accelerator_;
  };

 private:
  struct AutocastState {
    explicit AutocastState(c10::DeviceType of);
    c10::DeviceType device;
    bool enabled;
    c10::ScalarType dtype;
  };
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  AutocastState cpu_;
  std::optional<AutocastState> accelerator_{};  // if there is one
  bool cache_enabled_;
};

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
