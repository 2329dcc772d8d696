#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "lockstep/parallel/module/module_contents.h"
#include "lockstep/parallel/module/wrapped_module.h"

// This header follows torch.optim.swa_utils (PyTorch documentation,
// "torch.optim", Weight Averaging).
namespace lockstep {

// Returns the new average of a parameter from its present average, the model's
// value, and the number of models that are in the average (int64, no
// dimensions). It must not change its arguments.
using AveragingFunction = std::function<at::Tensor(
    const at::Tensor& averaged, const at::Tensor& current,
    const at::Tensor& n_averaged)>;

// Returns the exponential moving average: decay * averaged + (1 - decay) *
// current. Throws std::invalid_argument unless `decay` is from 0 to 1.
AveragingFunction get_ema_avg_fn(double decay = 0.999);

// Returns the average in which all models have equal weight.
AveragingFunction get_swa_avg_fn();

// The arguments of torch.optim.swa_utils.AveragedModel.
struct AveragedModelOptions {
  // The device of the average. None means the model's.
  std::optional<at::Device> device{};

  // How the average takes up a model. Empty means get_swa_avg_fn().
  AveragingFunction avg_fn{};

  // Whether buffers are averaged, too. If not, they are those of the model as
  // it was at the last update; update_bn() computes the running statistics of
  // batch norms anew.
  bool use_buffers{false};
};

// The part of AveragedModel that does not depend on the module's type.
class WeightAverage : public torch::nn::Module {
 public:
  // Updates the average with the parameters that `model` has now; the first
  // update copies them. `model` is the module whose copy this is, its holder or
  // shared_ptr, or its DistributedDataParallel.
  //
  // Throws std::invalid_argument if the number or shape of parameters or
  // buffers is another one than at construction, or only one of the two is
  // divided by FullyShard; nothing has changed then.
  template <typename Model>
  void update_parameters(const Model& model) {
    update(internal::module_of(model));
  }

  // The number of updates. It is a buffer with the name that Python has.
  int64_t n_averaged() const { return n_averaged_.item<int64_t>(); }

 protected:
  WeightAverage(std::shared_ptr<torch::nn::Module> module,
                const torch::nn::Module& model, AveragedModelOptions options);

 private:
  void update(const torch::nn::Module& model);

  std::shared_ptr<torch::nn::Module> averaged_;
  AveragedModelOptions options_;
  at::Tensor n_averaged_;
};

// A copy of a module whose parameters are an average over the steps of
// training: with equal weights (Izmailov et al., "Averaging Weights Leads to
// Wider Optima and Better Generalization", UAI 2018), or an exponential moving
// average.
//
//   AveragedModel<Net> average(net, {.avg_fn = get_ema_avg_fn(0.999)});
//   ...
//   optimizer.step();
//   average.update_parameters(net);
//   ...
//   average.eval();
//   auto output = average(input);
//
// `Model` is what DistributedDataParallel takes: a module holder, a
// Sequential, a class that derives from torch::nn::Module, or a std::shared_ptr
// of one. It is copied with clone(), so it must be torch::nn::Cloneable; for
// other modules give the constructor a second one to use as the copy.
//
// This is a torch::nn::Module with Python's state_dict(): the buffer
// n_averaged, and the averaged module under "module.". Save it with
// save_model("average.pt", average), or the averaged weights alone with
// save_model("average.pt", *average.module()).
//
// Ranks. Nothing is communicated. With DistributedDataParallel all ranks have
// the same parameters after each step, so each computes the same average; one
// rank may do so alone, if only that one uses it. With a
// ZeroRedundancyOptimizer that shares parameters, call its synchronize() before
// the constructor and before each update: other ranks may not have stepped
// their part yet, and a rank must not read parameters that another one writes.
// (With private parameters step() has gathered them.)
//
// FullyShard. The average of a divided model is divided, too: the copy is the
// module() of a second FullyShard, through which the average is called. Each
// rank averages its shards.
//
//   FullyShard<Net> model(make), average_unit(make);
//   AveragedModel<Net> average(model.module(), average_unit.module(), ...);
//   average.update_parameters(model);   // after optimizer.step()
//   NoGradGuard no_grad;
//   auto output = average_unit(input);  // not average(input)
//
// An update costs a pass over all parameters, and the average as much memory as
// the model. Threads: one at a time.
//
// (The parameter is not named Module, because that would be torch::nn::Module
// in a class that derives from it.)
template <typename Model>
class AveragedModel : public WeightAverage {
  using Pointer = internal::ModulePointer<Model>;
  using Impl = typename decltype(Pointer::get(
      std::declval<ModuleHandle<Model>&>()))::element_type;

 public:
  // Throws std::invalid_argument if the module cannot be cloned, or is divided
  // by FullyShard.
  explicit AveragedModel(const ModuleHandle<Model>& model,
                         const AveragedModelOptions& options = {})
      : AveragedModel(*Pointer::get(model),
                      std::dynamic_pointer_cast<Impl>(internal::clone_module(
                          *Pointer::get(model), options.device,
                          "AveragedModel cannot copy")),
                      options) {}

  template <class = void>
  explicit AveragedModel(  // no such option
      const ModuleHandle<Model>&, ...) = delete;

  // Uses `copy`, another module with parameters of the same shapes, to which
  // the values of `model` are copied. Its mode (training or not) stays.
  AveragedModel(const ModuleHandle<Model>& model,
                const ModuleHandle<Model>& copy,
                const AveragedModelOptions& options = {})
      : AveragedModel(*Pointer::get(model), Pointer::get(copy), options) {}

  // Calls the averaged module.
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return module_->forward(std::forward<Args>(args)...);
  }
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  const std::shared_ptr<Impl>& module() const { return module_; }

 private:
  AveragedModel(const torch::nn::Module& model, std::shared_ptr<Impl> copy,
                const AveragedModelOptions& options)
      : WeightAverage(copy, model, options), module_(std::move(copy)) {}

  std::shared_ptr<Impl> module_;
};

}  // namespace lockstep
