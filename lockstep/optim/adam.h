#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <optional>
#include <tuple>
#include <vector>

#include "lockstep/optim/fused_optimizer.h"

namespace lockstep::optim {

// The options of torch.optim.Adam and torch.optim.AdamW (PyTorch
// documentation). `TorchOptions`: LibTorch's. `decays`: whether weights decay
// by default, as with AdamW.
template <class TorchOptions, bool decays>
struct AdamLikeOptions {
  double lr{1e-3};
  std::tuple<double, double> betas{0.9, 0.999};
  double eps{1e-8};
  double weight_decay{decays ? 1e-2 : 0};
  bool amsgrad{false};
  bool maximize{false};  // for all parameter groups

  TorchOptions to_torch() const {
    return TorchOptions(lr)
        .betas(betas)
        .eps(eps)
        .weight_decay(weight_decay)
        .amsgrad(amsgrad);
  }
};

// A parameter group, as the dict that torch.optim.Adam or AdamW takes: an
// option that is not given is the optimizer's.
template <class TorchOptions>
struct AdamLikeGroup {
  std::vector<at::Tensor> params{};
  std::optional<double> lr{};
  std::optional<std::tuple<double, double>> betas{};
  std::optional<double> eps{};
  std::optional<double> weight_decay{};
  std::optional<bool> amsgrad{};

  // Returns the group with all options, those that are not given from
  // `defaults`: for code that takes groups of any optimizer.
  torch::optim::OptimizerParamGroup to_torch(
      const TorchOptions& defaults) const;
};

using AdamOptions = AdamLikeOptions<torch::optim::AdamOptions, false>;
using AdamGroup = AdamLikeGroup<torch::optim::AdamOptions>;
using AdamWOptions = AdamLikeOptions<torch::optim::AdamWOptions, true>;
using AdamWGroup = AdamLikeGroup<torch::optim::AdamWOptions>;

// torch::optim::Adam with LibTorch's fused kernel: one pass over a parameter,
// its gradient and its moments. The numbers are those of Python's
// torch.optim.Adam(fused=True), bit for bit; for a gradient whose strides are
// not its parameter's, which that kernel of torch 2.13 pairs with the wrong
// elements, they are those of fused=False to rounding.
//
// AdamW lists what holds for all optimizers of this folder.
class Adam : public FusedOptimizer<torch::optim::Adam, AdamOptions, AdamGroup> {
 public:
  using FusedOptimizer::FusedOptimizer;
  template <class = void>
  explicit Adam(  // no such option
      const std::vector<at::Tensor>&, ...) = delete;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// torch::optim::AdamW with LibTorch's fused kernel: one pass over a parameter,
// its gradient and its moments. The numbers are those of Python's
// torch.optim.AdamW(fused=True), bit for bit.
//
// This holds for all optimizers of this folder:
// - They are LibTorch's own classes with another step(): parameter groups,
//   their options (torch::optim::...Options), learning-rate schedulers, state,
//   snapshots and save()/load() are LibTorch's, and a snapshot can be exchanged
//   between both and with Python. `maximize` is what the constructor was given:
//   a snapshot holds it, and loads only into an optimizer that has the same; an
//   archive of save() does not hold it.
// - A group of LibTorch's that has options keeps all of them as they are:
//   each group of torch.optim.AdamW([{"params": a, "weight_decay": 0.0}, ...])
//   has the numbers that were given. LibTorch 2.13's own classes, and
//   add_param_group() through a reference to torch::optim::Optimizer, which is
//   not virtual, replace an option that equals the default of its class by the
//   optimizer's, so that a group of SGD cannot decay by 0. A group of this
//   folder (AdamWGroup) has the optimizer's options where it gives none, as in
//   Python. If a group of LibTorch's has an option that equals the default of
//   its class and is not the optimizer's, this is said once (TORCH_WARN_ONCE),
//   since a program that relies on LibTorch's rule means the optimizer's. A
//   group with options of another optimizer is refused with
//   std::invalid_argument.
// - Complex parameters are stepped as pairs of reals, as Python's optimizers
//   without `fused` do; LibTorch's own classes compute other numbers.
// - A parameter that is named twice in a group, as module->parameters() names
//   tied weights, is kept once, as in Python: it is stepped once and has one
//   number in snapshots. A parameter in two groups makes the constructor and
//   add_param_group() throw std::invalid_argument. (Not so if the group is
//   added through a reference to torch::optim::Optimizer, whose
//   add_param_group() is not virtual.)
// - A parameter without a gradient is skipped. Parameters must be dense and of
//   a floating or complex dtype; step() throws std::invalid_argument for the
//   first one that is not, that has a sparse gradient, or whose state has other
//   sizes, another dtype or another device. Earlier groups have been stepped
//   then.
// - If memory for the state runs out, step() throws before a parameter of that
//   group, dtype and device has changed (of half and bfloat16 parameters of SGD
//   on the CPU: before the present one has), and can be called again.
// - Results do not depend on how a parameter is cut into pieces, if all pieces
//   but the last are multiples of 64 elements, nor on the number of threads.
//
// The constructor throws c10::Error for options that make no sense, as LibTorch
// does. Threads: one at a time.
class AdamW
    : public FusedOptimizer<torch::optim::AdamW, AdamWOptions, AdamWGroup> {
 public:
  using FusedOptimizer::FusedOptimizer;
  template <class = void>
  explicit AdamW(  // no such option
      const std::vector<at::Tensor>&, ...) = delete;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace lockstep::optim
