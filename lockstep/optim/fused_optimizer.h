#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <utility>
#include <vector>

#include "lockstep/state/optimizer_group.h"

namespace lockstep::optim {

// The constructors and groups of SGD, Adam and AdamW: LibTorch's class `Base`
// with options that are members (OptionsType) and groups that give some of them
// (GroupType). AdamW lists what holds for all of them.
template <class Base, class OptionsType, class GroupType>
class FusedOptimizer : public Base, public internal::MaximizeOption {
 public:
  using OptimizerParamGroup = torch::optim::OptimizerParamGroup;
  using ParamGroups = std::vector<OptimizerParamGroup>;
  using Options = OptionsType;
  using Group = GroupType;
  using TorchOptions = decltype(Options().to_torch());

  explicit FusedOptimizer(std::vector<at::Tensor> parameters,
                          const Options& options = {})
      : FusedOptimizer(ParamGroups{OptimizerParamGroup(std::move(parameters))},
                       options) {}
  explicit FusedOptimizer(const ParamGroups& groups,
                          const Options& options = {})
      : FusedOptimizer(groups, options.to_torch(), options.maximize) {}
  explicit FusedOptimizer(const std::vector<Group>& groups,
                          const Options& options = {})
      : FusedOptimizer(with_options(groups, options.to_torch()), options) {}
  // These overloads accept the options of programs that used LibTorch's class.
  template <std::convertible_to<TorchOptions> O>
  FusedOptimizer(std::vector<at::Tensor> parameters, const O& options)
      : FusedOptimizer(ParamGroups{OptimizerParamGroup(std::move(parameters))},
                       options, false) {}
  template <std::convertible_to<TorchOptions> O>
  FusedOptimizer(const ParamGroups& groups, const O& options)
      : FusedOptimizer(groups, options, false) {}

  void add_param_group(const OptimizerParamGroup& group);
  void add_param_group(const Group& group) {
    add_param_group(
        group.to_torch(static_cast<TorchOptions&>(*this->defaults_)));
  }
  bool maximize() const override { return maximize_; }

 private:
  FusedOptimizer(const ParamGroups& groups, const TorchOptions& options,
                 bool maximize);

  static ParamGroups with_options(const std::vector<Group>& groups,
                                  const TorchOptions& defaults) {
    ParamGroups whole;
    for (const Group& group : groups) whole.push_back(group.to_torch(defaults));
    return whole;
  }

  bool maximize_;
};

}  // namespace lockstep::optim
