#include "lockstep/optim/fused_step.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>

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
  if (!parameter.is_floating_point() && !parameter.is_complex()) {
    refuse("is of ", parameter.scalar_type(),
           "; only floating-point and complex numbers can be stepped");
  }
  if (!parameter.is_non_overlapping_and_dense()) {
    refuse("has gaps or overlaps in its memory (sizes ", parameter.sizes(),
           ", strides ", parameter.strides(),
           "), but the fused kernel takes dense parameters; give it memory of "
           "its own: parameter.set_data(parameter.contiguous())");
  }
  if (gradient.scalar_type() != parameter.scalar_type() ||
      gradient.device() != parameter.device()) {
    refuse("is ", parameter.scalar_type(), " on ", parameter.device(),
           ", its gradient ", gradient.scalar_type(), " on ", gradient.device(),
           "; they must be the same");
  }
}

}  // namespace

at::Tensor as_real(at::Tensor tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void fit_state(const char* optimizer, const at::Tensor& parameter,
               size_t number, const char* name, at::Tensor& state) {
  if (state.sizes() != parameter.sizes() ||
      state.dtype() != parameter.dtype() ||
      state.device() != parameter.device()) {
    const auto words = [](const at::Tensor& of) {
      return c10::str(of.scalar_type(), of.sizes(), " on ", of.device());
    };
    throw std::invalid_argument(c10::str(
        optimizer, ": parameter ", number, " of its group is ",
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
    if (gradient.is_conj()) gradient = gradient.resolve_conj();
    const auto dtype = c10::toRealValueType(parameter.scalar_type());
    auto batch = std::find_if(
        batches.begin(), batches.end(), [&](const FusedBatch& each) {
          const at::Tensor& like = each.parameters.front();
          return like.scalar_type() == dtype &&
                 like.device() == parameter.device();
        });
    if (batch == batches.end()) {
      batch = batches.emplace(batches.end());
      batch->parameters.reserve(parameters.size() - i);
      batch->gradients.reserve(parameters.size() - i);
      batch->numbers.reserve(parameters.size() - i);
    }
    batch->parameters.push_back(as_real(parameter));
    batch->gradients.push_back(as_real(std::move(gradient)));
    batch->numbers.push_back(i);
  }
  return batches;
}

std::vector<std::vector<FusedBatch>> fused_batches(const char* optimizer,
                                                   const ParamGroups& groups) {
  std::vector<std::vector<FusedBatch>> all;
  for (const auto& group : groups) {
    all.push_back(fused_batches(optimizer, group.params()));
  }
  return all;
}

ParamGroups distinct_groups(const char* optimizer, ParamGroups groups,
                            const ParamGroups& before) {
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
          c10::str(optimizer, ": a parameter of sizes ", parameter.sizes(),
                   " appears in more than one parameter group; name each "
                   "parameter in one group"));
    }
  }
  return groups;
}

OptionNumbers numbers_of(const torch::optim::SGDOptions& options) {
  return {{"momentum", {options.momentum()}},
          {"dampening", {options.dampening()}},
          {"weight_decay", {options.weight_decay()}},
          {"nesterov", {options.nesterov() ? 1.0 : 0.0}}};
}

void warn_of_unset(const char* optimizer, const OptionNumbers& given,
                   const OptionNumbers& unset, const OptionNumbers& defaults) {
  std::string doubtful;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& [name, numbers] = given[i];
    if (numbers != unset[i].second || numbers == defaults[i].second) continue;
    doubtful += c10::str(doubtful.empty() ? "" : ", ", name, " ",
                         c10::Join(" and ", numbers), " (the optimizer has ",
                         c10::Join(" and ", defaults[i].second), ")");
  }
  if (doubtful.empty()) return;
  TORCH_WARN_ONCE(
      optimizer, ": a parameter group of LibTorch's has ", doubtful,
      "; LibTorch's options have the same if it was not set, and the group "
      "keeps it. Give a lockstep::optim::",
      optimizer,
      "Group: an option that it does not give is the optimizer's, and one that "
      "it gives is meant (its to_torch() makes a group of LibTorch's).");
}

void refuse_options(const char* optimizer,
                    const torch::optim::OptimizerOptions& given,
                    const std::type_info& allowed) {
  throw std::invalid_argument(
      c10::str(optimizer, ": a parameter group has options of type ",
               c10::demangle(typeid(given).name()), "; give it ",
               c10::demangle(allowed.name()), ", or none"));
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
