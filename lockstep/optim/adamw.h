#pragma once

#include <torch/optim/adamw.h>

#include <concepts>
#include <tuple>
#include <vector>

namespace lockstep::optim {

// After torch.optim.AdamW (PyTorch documentation).
struct AdamWOptions {
  double lr{1e-3};
  std::tuple<double, double> betas{0.9, 0.999};
  double eps{1e-8};
  double weight_decay{1e-2};
  bool amsgrad{false};
  bool maximize{false};  // of all parameter groups

  torch::optim::AdamWOptions to_torch() const;
};

// torch::optim::AdamW with LibTorch's fused kernel: one pass over a parameter,
// its gradient and its moments. The numbers are those of Python's
// torch.optim.AdamW(fused=True), bit for bit.
//
// What holds for all optimizers of this folder:
// - They are LibTorch's own classes with another step(): parameter groups,
//   their options (torch::optim::...Options), learning-rate schedulers, state,
//   snapshots and save()/load() are LibTorch's, and a snapshot goes from one to
//   the other and to Python. Snapshots do not hold `maximize`: it is whatever
//   the constructor was given.
// - A parameter that is named twice in a group, as module->parameters() names
//   tied weights, stands there once, as it does in Python: it is stepped once
//   and has one number in snapshots. In two groups it is a
//   std::invalid_argument. (Not so for a group that is added through a
//   reference to torch::optim::Optimizer, whose add_param_group() is not
//   virtual.)
// - A parameter without a gradient is skipped. Parameters are dense, of a
//   floating dtype; step() throws std::invalid_argument that names the first
//   that is not, or has a sparse gradient. Earlier groups are stepped then.
// - Results do not depend on how a parameter is cut into pieces, if all but the
//   last are multiples of 64 elements, nor on the number of threads.
//
// The constructor throws c10::Error for options that make no sense, as
// LibTorch's. Threads: one at a time.
class AdamW : public torch::optim::AdamW {
 public:
  using OptimizerParamGroup = torch::optim::OptimizerParamGroup;
  using ParamGroups = std::vector<OptimizerParamGroup>;
  using Options = AdamWOptions;

  explicit AdamW(std::vector<at::Tensor> parameters,
                 const Options& options = {});
  explicit AdamW(const ParamGroups& groups, const Options& options = {});
  // What a program that used torch::optim::AdamW gives already.
  template <std::convertible_to<torch::optim::AdamWOptions> O>
  AdamW(std::vector<at::Tensor> parameters, const O& options)
      : AdamW(ParamGroups{OptimizerParamGroup(std::move(parameters))}, options,
              false) {}
  template <std::convertible_to<torch::optim::AdamWOptions> O>
  AdamW(const ParamGroups& groups, const O& options)
      : AdamW(groups, options, false) {}

  void add_param_group(const OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  AdamW(const ParamGroups& groups, const torch::optim::AdamWOptions& options,
        bool maximize);

  bool maximize_;
};

}  // namespace lockstep::optim
