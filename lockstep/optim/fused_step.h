#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <utility>
#include <vector>

// What the optimizers of this folder share. Internal to it.
namespace lockstep::optim {

using States =
    ska::flat_hash_map<void*,
                       std::unique_ptr<torch::optim::OptimizerParamState>>;

// What one call of a fused kernel takes: tensors of one dtype and device.
struct FusedBatch {
  std::vector<at::Tensor> parameters{};
  std::vector<at::Tensor> gradients{};  // in their parameters' strides
};

// Those of `parameters` that have a gradient. Throws std::invalid_argument,
// naming `optimizer` and the parameter, for what the kernels cannot take.
std::vector<FusedBatch> fused_batches(
    const char* optimizer, const std::vector<at::Tensor>& parameters);

// `groups` with each parameter once. Throws std::invalid_argument, as Python
// does, if one stands in two groups, or in one of `before`.
std::vector<torch::optim::OptimizerParamGroup> distinct_groups(
    std::vector<torch::optim::OptimizerParamGroup> groups,
    const std::vector<torch::optim::OptimizerParamGroup>& before = {});

// The closure's result, with autograd enabled; undefined without a closure.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

// Scalars in the form that the kernels want: [], float32, on the parameters'
// device. Parameters of equal steps, which are nearly always all, share one.
class StepTensors {
 public:
  explicit StepTensors(c10::Device device) : device_(device) {}
  const at::Tensor& at(int64_t step);

 private:
  c10::Device device_;
  std::vector<std::pair<int64_t, at::Tensor>> made_;
};

// Adam and AdamW differ in the types of LibTorch's classes and the kernel.
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
    }
  }
}

}  // namespace lockstep::optim
