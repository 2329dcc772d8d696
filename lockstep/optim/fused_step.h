#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "lockstep/trace/span.h"

// The code that the optimizers of this folder share. Internal to the folder.
namespace lockstep::internal {

using States =
    ska::flat_hash_map<void*,
                       std::unique_ptr<torch::optim::OptimizerParamState>>;

// Returns a complex tensor as the pairs of reals that Python's optimizers step,
// and a real one as it is.
at::Tensor as_real(at::Tensor tensor);

// The input of one call of a fused kernel: tensors of one dtype and device,
// complex ones as_real().
struct FusedBatch {
  std::vector<at::Tensor> parameters{};
  std::vector<at::Tensor> gradients{};  // in their parameters' strides
  std::vector<size_t> numbers{};        // of the parameters in their group
};

// Returns those of `parameters` that have a gradient, in batches. Throws
// std::invalid_argument, naming `optimizer` and the parameter, if the kernels
// cannot take one.
std::vector<FusedBatch> fused_batches(
    const char* optimizer, const std::vector<at::Tensor>& parameters);

// Makes `state` ready for the kernels, which look neither at its sizes nor at
// its strides: the tensor that `optimizer` keeps under `name` for `parameter`,
// which has this number in its group. If its strides are not the parameter's,
// because the parameter was changed or the state loaded, a copy takes its
// place. Throws std::invalid_argument, naming optimizer and parameter, if
// sizes, dtype or device are not the parameter's.
void fit_state(const char* optimizer, const at::Tensor& parameter,
               size_t number, const char* name, at::Tensor& state);

// Raises the versions of what is about to be written, which the fused kernels
// do not: so that autograd, FullyShard and snapshots notice the change. Call it
// before the kernel: a snapshot whose copy ends while the kernel writes must
// notice it, too.
void raise_versions(at::TensorList tensors);

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// Returns the batches of each group, before a step writes anything: a gradient
// that is refused in one group leaves the others alone.
std::vector<std::vector<FusedBatch>> fused_batches(const char* optimizer,
                                                   const ParamGroups& groups);

// Returns `groups` with each parameter once. Throws std::invalid_argument that
// names `optimizer` if a parameter is in two groups, as in Python, or also in
// one of `before`.
ParamGroups distinct_groups(const char* optimizer, ParamGroups groups,
                            const ParamGroups& before = {});

// The options that a group of LibTorch's may leave at the defaults of their
// class, as numbers by name. (SGD's options cannot be made without a rate.)
using OptionNumbers = std::vector<std::pair<const char*, std::vector<double>>>;
OptionNumbers numbers_of(const torch::optim::SGDOptions& options);
template <class AdamLike>
OptionNumbers numbers_of(const AdamLike& options) {
  const auto [beta1, beta2] = options.betas();
  return {{"lr", {options.lr()}},
          {"betas", {beta1, beta2}},
          {"eps", {options.eps()}},
          {"weight_decay", {options.weight_decay()}},
          {"amsgrad", {options.amsgrad() ? 1.0 : 0.0}}};
}

// Warns once in a process of options of a group that may not have been set:
// those that are as in `unset`, the defaults of their class, and not as in
// `defaults`, the optimizer's.
void warn_of_unset(const char* optimizer, const OptionNumbers& given,
                   const OptionNumbers& unset, const OptionNumbers& defaults);

[[noreturn]] void refuse_options(const char* optimizer,
                                 const torch::optim::OptimizerOptions& given,
                                 const std::type_info& allowed);

// Options of a group all of which are meant, as to_torch() of a group of this
// folder makes them. So are copies of them. Options of LibTorch's do not tell
// what was set from the defaults of their class.
template <class TorchOptions>
class MeantOptions final : public TorchOptions {
 public:
  explicit MeantOptions(const TorchOptions& options) : TorchOptions(options) {}

 private:
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<MeantOptions>(*this);
  }
};

// The optimizer's name, for errors.
template <class TorchOptions>
constexpr const char* kOptimizerName =
    std::is_same_v<TorchOptions, torch::optim::AdamOptions>    ? "Adam"
    : std::is_same_v<TorchOptions, torch::optim::AdamWOptions> ? "AdamW"
                                                               : "SGD";

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
// kernel. Returns the closure's loss.
template <class TorchOptions, class State, class Kernel>
at::Tensor step_adam(const torch::optim::Optimizer::LossClosure& closure,
                     ParamGroups& groups, States& states, bool maximize,
                     Kernel kernel) {
  constexpr const char* name = kOptimizerName<TorchOptions>;
  const at::Tensor loss = loss_of(closure);
  const Span span("optim", "step");
  const at::NoGradGuard no_grad;
  const auto batches = fused_batches(name, groups);
  for (size_t g = 0; g < groups.size(); ++g) {
    auto& group = groups[g];
    const auto& options = static_cast<const TorchOptions&>(group.options());
    const auto [beta1, beta2] = options.betas();
    for (const FusedBatch& batch : batches[g]) {
      // If memory runs out, or the kernel throws, the step can be made again:
      // a parameter's first state is kept, and its step counted, only when the
      // kernel has returned.
      StepTensors numbers(batch.parameters.front().device());
      std::vector<std::pair<void*, std::unique_ptr<State>>> made;
      std::vector<State*> all;
      std::vector<at::Tensor> averages, squares, maxima, steps;
      const size_t count = batch.parameters.size();
      all.reserve(count);
      for (auto* list : {&averages, &squares, &steps}) list->reserve(count);
      for (size_t i = 0; i < count; ++i) {
        const size_t number = batch.numbers[i];
        const at::Tensor& parameter = group.params()[number];
        void* const key = parameter.unsafeGetTensorImpl();
        const auto found = states.find(key);
        auto* state = found == states.end()
                          ? nullptr
                          : static_cast<State*>(found->second.get());
        if (!state) {
          made.emplace_back(key, std::make_unique<State>());
          state = made.back().second.get();
        }
        all.push_back(state);
        const auto ready = [&](const char* tensor, at::Tensor& moment) {
          if (moment.defined()) {
            fit_state(name, parameter, number, tensor, moment);
          } else {
            moment = at::zeros_like(parameter.detach());
          }
          return as_real(moment);
        };
        averages.push_back(ready("exp_avg", state->exp_avg()));
        squares.push_back(ready("exp_avg_sq", state->exp_avg_sq()));
        if (options.amsgrad()) {
          maxima.push_back(ready("max_exp_avg_sq", state->max_exp_avg_sq()));
        }
        steps.push_back(numbers.at(state->step() + 1));
      }
      raise_versions(batch.parameters);
      raise_versions(averages);
      raise_versions(squares);
      raise_versions(maxima);
      kernel(batch.parameters, batch.gradients, averages, squares, maxima,
             steps, options.lr(), beta1, beta2, options.weight_decay(),
             options.eps(), options.amsgrad(), maximize);
      for (State* state : all) state->step(state->step() + 1);
      for (auto& [key, state] : made) states[key] = std::move(state);
    }
  }
  return loss;
}

}  // namespace lockstep::internal
