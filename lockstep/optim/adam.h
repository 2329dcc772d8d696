#pragma once

#include <torch/optim/adam.h>

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "lockstep/optim/fused_optimizer.h"

namespace lockstep {
namespace internal {

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
      const TorchOptions& defaults) const {
    auto options = std::make_unique<MeantOptions<TorchOptions>>(defaults);
    if (lr) options->lr(*lr);
    if (betas) options->betas(*betas);
    if (eps) options->eps(*eps);
    if (weight_decay) options->weight_decay(*weight_decay);
    if (amsgrad) options->amsgrad(*amsgrad);
    return {params, std::move(options)};
  }
};

}  // namespace internal

namespace optim {

using AdamOptions = internal::AdamLikeOptions<torch::optim::AdamOptions, false>;
using AdamGroup = internal::AdamLikeGroup<torch::optim::AdamOptions>;

}  // namespace optim

namespace internal {

struct AdamTypes {
  static constexpr const char* kName = "Adam";
  using Base = torch::optim::Adam;
  using TorchOptions = torch::optim::AdamOptions;
  using State = torch::optim::AdamParamState;
  using Options = optim::AdamOptions;
  using Group = optim::AdamGroup;
};

}  // namespace internal

namespace optim {

// torch::optim::Adam with LibTorch's fused kernel: one pass over a parameter,
// its gradient and its moments. The numbers are those of Python's
// torch.optim.Adam(fused=True), bit for bit.
//
// adamw.h lists what holds for all optimizers of this folder.
class Adam : public internal::FusedOptimizer<internal::AdamTypes> {
 public:
  using FusedOptimizer::FusedOptimizer;
  template <class = void>
  explicit Adam(  // no such option
      const std::vector<at::Tensor>&, ...) = delete;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace optim
}  // namespace lockstep
