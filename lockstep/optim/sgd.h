#pragma once

#include <torch/optim/sgd.h>

#include <optional>
#include <vector>

#include "lockstep/optim/fused_optimizer.h"

namespace lockstep::optim {

// The options of torch.optim.SGD (PyTorch documentation).
struct SGDOptions {
  double lr{1e-3};
  double momentum{0};
  double dampening{0};
  double weight_decay{0};
  bool nesterov{false};
  bool maximize{false};  // for all parameter groups

  torch::optim::SGDOptions to_torch() const;
};

// A parameter group, as the dict that torch.optim.SGD takes: an option that is
// not given is the optimizer's.
struct SGDGroup {
  std::vector<at::Tensor> params{};
  std::optional<double> lr{};
  std::optional<double> momentum{};
  std::optional<double> dampening{};
  std::optional<double> weight_decay{};
  std::optional<bool> nesterov{};

  // Returns the group with all options, those that are not given from
  // `defaults`: for code that takes groups of any optimizer.
  torch::optim::OptimizerParamGroup to_torch(
      const torch::optim::SGDOptions& defaults) const;
};

// torch::optim::SGD with LibTorch's fused kernel: one pass over a parameter,
// its gradient and its momentum; the C++ original makes one pass for each term.
// The numbers are those of Python's torch.optim.SGD(fused=True), bit for bit;
// for half and bfloat16 parameters on the CPU, and for gradients whose strides
// are not their parameters', which that kernel of LibTorch 2.13 steps wrongly,
// they are those of SGD(fused=False).
//
// AdamW lists what holds for all optimizers of this folder.
class SGD : public FusedOptimizer<torch::optim::SGD, SGDOptions, SGDGroup> {
 public:
  using FusedOptimizer::FusedOptimizer;
  template <class = void>
  explicit SGD(  // no such option
      const std::vector<at::Tensor>&, ...) = delete;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace lockstep::optim
