#pragma once

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"

namespace lockstep::optim {

class ConstantLR;

// The arguments of torch.optim.lr_scheduler.ConstantLR (PyTorch documentation).
struct ConstantLROptions {
  using Scheduler = ConstantLR;

  // The factor of the first epochs; above 0, at most 1. Python takes 0, too,
  // and then fails in epoch total_iters.
  double factor{1.0 / 3};

  // The number of these epochs.
  int64_t total_iters{5};
};

// Multiplies the rates by `factor` until epoch total_iters.
class ConstantLR final : public internal::FormulaScheduler {
 public:
  explicit ConstantLR(torch::optim::Optimizer& optimizer,
                      const ConstantLROptions& options = {})
      : ConstantLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                   options) {}
  template <class = void>
  explicit ConstantLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  ConstantLR(internal::SchedulerGroupsPtr groups,
             const ConstantLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  double factor_;
  int64_t total_iters_;
};

}  // namespace lockstep::optim
