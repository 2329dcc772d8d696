#pragma once

#include <torch/optim/sgd.h>

#include <concepts>
#include <optional>
#include <vector>

#include "lockstep/base/maximize_option.h"

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
// for half and bfloat16 parameters on the CPU, which that kernel of LibTorch
// 2.13 steps wrongly, they are those of SGD(fused=False).
//
// adamw.h lists what holds for all optimizers of this folder.
class SGD : public torch::optim::SGD, public internal::MaximizeOption {
 public:
  using OptimizerParamGroup = torch::optim::OptimizerParamGroup;
  using ParamGroups = std::vector<OptimizerParamGroup>;
  using Options = SGDOptions;

  explicit SGD(std::vector<at::Tensor> parameters, const Options& options = {});
  explicit SGD(const ParamGroups& groups, const Options& options = {});
  explicit SGD(const std::vector<SGDGroup>& groups,
               const Options& options = {});
  template <class = void>
  explicit SGD(  // no such option
      const std::vector<at::Tensor>&, ...) = delete;
  // These overloads accept the options of programs that used torch::optim::SGD.
  template <std::convertible_to<torch::optim::SGDOptions> O>
  SGD(std::vector<at::Tensor> parameters, const O& options)
      : SGD(ParamGroups{OptimizerParamGroup(std::move(parameters))}, options,
            false) {}
  template <std::convertible_to<torch::optim::SGDOptions> O>
  SGD(const ParamGroups& groups, const O& options)
      : SGD(groups, options, false) {}

  void add_param_group(const OptimizerParamGroup& group);
  void add_param_group(const SGDGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  bool maximize() const override { return maximize_; }

 private:
  SGD(const ParamGroups& groups, const torch::optim::SGDOptions& options,
      bool maximize);

  bool maximize_;
};

}  // namespace lockstep::optim
