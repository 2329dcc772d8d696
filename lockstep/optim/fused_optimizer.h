#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/state/optimizer_group.h"

namespace lockstep::internal {

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

// The base of the optimizers of lockstep::optim: LibTorch's class
// `Types::Base` with options that are members (Options) and groups that give
// some of them (Group). AdamW lists what holds for all of them.
template <class Types>
class FusedOptimizer : public Types::Base, public MaximizeOption {
 public:
  using OptimizerParamGroup = torch::optim::OptimizerParamGroup;
  using ParamGroups = std::vector<OptimizerParamGroup>;
  using Options = typename Types::Options;
  using Group = typename Types::Group;
  using TorchOptions = typename Types::TorchOptions;

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

}  // namespace lockstep::internal
