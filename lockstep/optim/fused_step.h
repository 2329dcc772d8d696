#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <utility>
#include <vector>

// The code that the optimizers of this folder share. Internal to the folder.
namespace lockstep::internal {

using States =
    ska::flat_hash_map<void*,
                       std::unique_ptr<torch::optim::OptimizerParamState>>;

// The input of one call of a fused kernel: tensors of one dtype and device.
struct FusedBatch {
  std::vector<at::Tensor> parameters{};
  std::vector<at::Tensor> gradients{};  // in their parameters' strides
};

// Returns those of `parameters` that have a gradient, in batches. Throws
// std::invalid_argument, naming `optimizer` and the parameter, if the kernels
// cannot take one.
std::vector<FusedBatch> fused_batches(
    const char* optimizer, const std::vector<at::Tensor>& parameters);

// Raises the versions of the parameters, which the fused kernels do not: so
// that autograd, FullyShard and snapshots that are written meanwhile notice the
// change, as with any optimizer that writes with LibTorch's operators.
void raise_versions(const FusedBatch& batch);

// Returns `groups` with each parameter once. Throws std::invalid_argument, as
// Python does, if a parameter is in two groups, or also in one of `before`.
std::vector<torch::optim::OptimizerParamGroup> distinct_groups(
    std::vector<torch::optim::OptimizerParamGroup> groups,
    const std::vector<torch::optim::OptimizerParamGroup>& before = {});

// Returns the closure's result, computed with autograd enabled; an undefined
// tensor without a closure.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

// Step numbers as the kernels want them: 0-dimensional float32 tensors on the
// parameters' device. Parameters with equal step numbers (nearly always all)
// share one tensor.
class StepTensors {
 public:
  explicit StepTensors(c10::Device device) : device_(device) {}
  const at::Tensor& at(int64_t step);

 private:
  c10::Device device_;
  std::vector<std::pair<int64_t, at::Tensor>> made_;
};

// Adam and AdamW differ only in the types of LibTorch's classes and in the
// kernel.
template <class Options, class State, class Kernel>
void step_adam(const char* name,
               std::vector<torch::optim::OptimizerParamGroup>& groups,
               States& states, Kernel kernel) {
  for (auto& group : groups) {
    const auto& options = static_cast<const Options&>(group.options());
    for (const FusedBatch& batch : fused_batches(name, group.params())) {
      StepTensors numbers(batch.parameters.front().device());
      std::vector<at::Tensor> averages, squares, maxima, steps;
      for (const at::Tensor& parameter : batch.parameters) {
        auto& slot = states[parameter.unsafeGetTensorImpl()];
        if (!slot) slot = std::make_unique<State>();
        auto& state = static_cast<State&>(*slot);
        const auto zeros = [&] { return at::zeros_like(parameter.detach()); };
        if (!state.exp_avg().defined()) {
          state.exp_avg(zeros());
          state.exp_avg_sq(zeros());
        }
        averages.push_back(state.exp_avg());
        squares.push_back(state.exp_avg_sq());
        if (options.amsgrad()) {
          if (!state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(zeros());
          maxima.push_back(state.max_exp_avg_sq());
        }
        state.step(state.step() + 1);
        steps.push_back(numbers.at(state.step()));
      }
      kernel(options, batch, averages, squares, maxima, steps);
      raise_versions(batch);
    }
  }
}

}  // namespace lockstep::internal
