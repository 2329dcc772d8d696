#pragma once

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"

namespace lockstep::optim {

class StepLR;

// The arguments of torch.optim.lr_scheduler.StepLR (PyTorch documentation).
struct StepLROptions {
  using Scheduler = StepLR;

  // The number of epochs from one decay to the next; 1 or more. Required.
  int64_t step_size{0};

  // The factor of each decay.
  double gamma{0.1};
};

// Multiplies the rates by gamma every step_size epochs.
class StepLR final : public internal::FormulaScheduler {
 public:
  StepLR(torch::optim::Optimizer& optimizer, const StepLROptions& options)
      : StepLR(std::make_shared<internal::SchedulerGroups>(optimizer),
               options) {}
  template <class = void>
  explicit StepLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  // For a part of a SequentialLR or ChainedScheduler, as in all schedulers.
  StepLR(internal::SchedulerGroupsPtr groups, const StepLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  int64_t step_size_;
  double gamma_;
};

}  // namespace lockstep::optim
