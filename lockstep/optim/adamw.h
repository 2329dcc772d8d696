#pragma once

#include <torch/optim/adamw.h>

#include <concepts>
#include <tuple>
#include <vector>

#include "lockstep/base/maximize_option.h"

namespace lockstep::optim {

// The options of torch.optim.AdamW (PyTorch documentation).
struct AdamWOptions {
  double lr{1e-3};
  std::tuple<double, double> betas{0.9, 0.999};
  double eps{1e-8};
  double weight_decay{1e-2};
  bool amsgrad{false};
  bool maximize{false};  // for all parameter groups

  torch::optim::AdamWOptions to_torch() const;
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
// - A parameter that is named twice in a group, as module->parameters() names
//   tied weights, is kept once, as in Python: it is stepped once and has one
//   number in snapshots. A parameter in two groups makes the constructor and
//   add_param_group() throw std::invalid_argument. (Not so if the group is
//   added through a reference to torch::optim::Optimizer, whose
//   add_param_group() is not virtual.)
// - A parameter without a gradient is skipped. Parameters must be dense and of
//   a floating dtype; step() throws std::invalid_argument for the first one
//   that is not, that has a sparse gradient, or whose state has other sizes,
//   another dtype or another device. Earlier groups have been stepped then.
// - If memory for the state runs out, step() throws before a parameter of that
//   group, dtype and device has changed (of half and bfloat16 parameters of SGD
//   on the CPU: before the present one has), and can be called again.
// - Results do not depend on how a parameter is cut into pieces, if all pieces
//   but the last are multiples of 64 elements, nor on the number of threads.
//
// The constructor throws c10::Error for options that make no sense, as LibTorch
// does. Threads: one at a time.
class AdamW : public torch::optim::AdamW, public internal::MaximizeOption {
 public:
  using OptimizerParamGroup = torch::optim::OptimizerParamGroup;
  using ParamGroups = std::vector<OptimizerParamGroup>;
  using Options = AdamWOptions;

  explicit AdamW(std::vector<at::Tensor> parameters,
                 const Options& options = {});
  explicit AdamW(const ParamGroups& groups, const Options& options = {});
  // These overloads accept the options of programs that used
  // torch::optim::AdamW.
  template <std::convertible_to<torch::optim::AdamWOptions> O>
  AdamW(std::vector<at::Tensor> parameters, const O& options)
      : AdamW(ParamGroups{OptimizerParamGroup(std::move(parameters))}, options,
              false) {}
  template <std::convertible_to<torch::optim::AdamWOptions> O>
  AdamW(const ParamGroups& groups, const O& options)
      : AdamW(groups, options, false) {}

  void add_param_group(const OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  bool maximize() const override { return maximize_; }

 private:
  AdamW(const ParamGroups& groups, const torch::optim::AdamWOptions& options,
        bool maximize);

  bool maximize_;
};

}  // namespace lockstep::optim
