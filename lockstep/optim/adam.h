#pragma once

#include <torch/optim/adam.h>

#include <concepts>
#include <optional>
#include <tuple>
#include <vector>

#include "lockstep/base/maximize_option.h"

namespace lockstep::optim {

// The options of torch.optim.Adam (PyTorch documentation).
struct AdamOptions {
  double lr{1e-3};
  std::tuple<double, double> betas{0.9, 0.999};
  double eps{1e-8};
  double weight_decay{0};
  bool amsgrad{false};
  bool maximize{false};  // for all parameter groups

  torch::optim::AdamOptions to_torch() const;
};

// A parameter group, as the dict that torch.optim.Adam takes: an option that is
// not given is the optimizer's.
struct AdamGroup {
  std::vector<at::Tensor> params{};
  std::optional<double> lr{};
  std::optional<std::tuple<double, double>> betas{};
  std::optional<double> eps{};
  std::optional<double> weight_decay{};
  std::optional<bool> amsgrad{};

  // Returns the group with all options, those that are not given from
  // `defaults`: for code that takes groups of any optimizer.
  torch::optim::OptimizerParamGroup to_torch(
      const torch::optim::AdamOptions& defaults) const;
};

// torch::optim::Adam with LibTorch's fused kernel: one pass over a parameter,
// its gradient and its moments. The numbers are those of Python's
// torch.optim.Adam(fused=True), bit for bit.
//
// adamw.h lists what holds for all optimizers of this folder.
class Adam : public torch::optim::Adam, public internal::MaximizeOption {
 public:
  using OptimizerParamGroup = torch::optim::OptimizerParamGroup;
  using ParamGroups = std::vector<OptimizerParamGroup>;
  using Options = AdamOptions;

  explicit Adam(std::vector<at::Tensor> parameters,
                const Options& options = {});
  explicit Adam(const ParamGroups& groups, const Options& options = {});
  explicit Adam(const std::vector<AdamGroup>& groups,
                const Options& options = {});
  template <class = void>
  explicit Adam(  // no such option
      const std::vector<at::Tensor>&, ...) = delete;
  // These overloads accept the options of programs that used
  // torch::optim::Adam.
  template <std::convertible_to<torch::optim::AdamOptions> O>
  Adam(std::vector<at::Tensor> parameters, const O& options)
      : Adam(ParamGroups{OptimizerParamGroup(std::move(parameters))}, options,
             false) {}
  template <std::convertible_to<torch::optim::AdamOptions> O>
  Adam(const ParamGroups& groups, const O& options)
      : Adam(groups, options, false) {}

  void add_param_group(const OptimizerParamGroup& group);
  void add_param_group(const AdamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  bool maximize() const override { return maximize_; }

 private:
  Adam(const ParamGroups& groups, const torch::optim::AdamOptions& options,
       bool maximize);

  bool maximize_;
};

}  // namespace lockstep::optim
