#include "lockstep/optim/fused_step.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "lockstep/comm/distinct_tensors.h"

namespace lockstep::internal {
namespace {

void check(const char* optimizer, size_t index, const at::Tensor& parameter,
           const at::Tensor& gradient) {
  const auto refuse = [&](auto&&... why) {
    throw std::invalid_argument(
        c10::str(optimizer, ": parameter ", index, " of its group ", why...));
  };
  if (gradient.layout() != c10::kStrided) {
    refuse(
        "has a sparse gradient, which the fused kernel does not take; make the "
        "embedding dense (sparse(false)), or give its parameters to an "
        "optimizer for sparse gradients, such as torch::optim::SGD without "
        "momentum");
  }
  if (gradient.sizes() != parameter.sizes()) {
    refuse("is of sizes ", parameter.sizes(), ", its gradient of ",
           gradient.sizes(), "; they must be the same");
  }
  if (!at::isFloatingType(parameter.scalar_type())) {
    refuse("is of ", parameter.scalar_type(),
           ", but the fused kernel takes floating-point parameters; use "
           "torch::optim::",
           optimizer);
  }
  if (!parameter.is_non_overlapping_and_dense()) {
    refuse("has gaps or overlaps in its memory (sizes ", parameter.sizes(),
           ", strides ", parameter.strides(),
           "), but the fused kernel takes dense parameters; use torch::optim::",
           optimizer);
  }
  if (gradient.scalar_type() != parameter.scalar_type() ||
      gradient.device() != parameter.device()) {
    refuse("is ", parameter.scalar_type(), " on ", parameter.device(),
           ", its gradient ", gradient.scalar_type(), " on ", gradient.device(),
           "; they must be the same");
  }
}

}  // namespace

void fit_state(const char* optimizer, const FusedBatch& batch, size_t i,
               const char* name, at::Tensor& state) {
  const at::Tensor& parameter = batch.parameters[i];
  if (state.sizes() != parameter.sizes() ||
      state.dtype() != parameter.dtype() ||
      state.device() != parameter.device()) {
    const auto words = [](const at::Tensor& of) {
      return c10::str(of.scalar_type(), of.sizes(), " on ", of.device());
    };
    throw std::invalid_argument(c10::str(
        optimizer, ": parameter ", batch.numbers[i], " of its group is ",
        words(parameter), ", its ", name, " ", words(state),
        "; they must be alike: make the optimizer after the parameter has got "
        "its sizes, dtype and device, and then load its state"));
  }
  if (state.strides() == parameter.strides()) return;
  state = at::empty_like(parameter.detach()).copy_(state);
}

void raise_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    // Inference tensors have no version.
    if (tensor.is_inference()) continue;
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

std::vector<FusedBatch> fused_batches(
    const char* optimizer, const std::vector<at::Tensor>& parameters) {
  std::vector<FusedBatch> batches;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    check(optimizer, i, parameter, gradient);
    if (parameter.numel() == 0) continue;
    // The CPU kernels walk through memory linearly and ignore the strides.
    if (gradient.strides() != parameter.strides()) {
      gradient = at::empty_like(parameter.detach()).copy_(gradient);
    }
    auto batch = std::find_if(
        batches.begin(), batches.end(), [&](const FusedBatch& each) {
          const at::Tensor& like = each.parameters.front();
          return like.scalar_type() == parameter.scalar_type() &&
                 like.device() == parameter.device();
        });
    if (batch == batches.end()) {
      batch = batches.emplace(batches.end());
      batch->parameters.reserve(parameters.size() - i);
      batch->gradients.reserve(parameters.size() - i);
      batch->numbers.reserve(parameters.size() - i);
    }
    batch->parameters.push_back(parameter);
    batch->gradients.push_back(std::move(gradient));
    batch->numbers.push_back(i);
  }
  return batches;
}

std::vector<torch::optim::OptimizerParamGroup> distinct_groups(
    std::vector<torch::optim::OptimizerParamGroup> groups,
    const std::vector<torch::optim::OptimizerParamGroup>& before) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& group : before) {
    for (const at::Tensor& parameter : group.params()) {
      seen.insert(parameter.unsafeGetTensorImpl());
    }
  }
  for (auto& group : groups) {
    group.params() = distinct(std::move(group.params()));
    for (const at::Tensor& parameter : group.params()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      throw std::invalid_argument(
          c10::str("a parameter of sizes ", parameter.sizes(),
                   " appears in more than one parameter group; name each "
                   "parameter in one group"));
    }
  }
  return groups;
}

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const at::AutoGradMode with_grad(true);
  return closure();
}

const at::Tensor& StepTensors::at(int64_t step) {
  for (const auto& [number, tensor] : made_) {
    if (number == step) return tensor;
  }
  const auto options = at::TensorOptions(device_).dtype(at::kFloat);
  made_.emplace_back(step, at::scalar_tensor(step, options));
  return made_.back().second;
}

}  // namespace lockstep::internal
