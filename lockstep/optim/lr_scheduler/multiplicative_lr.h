#pragma once

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"
#include "lockstep/optim/lr_scheduler/lr_lambdas.h"

namespace lockstep::optim {

class MultiplicativeLR;

// The arguments of torch.optim.lr_scheduler.MultiplicativeLR (PyTorch
// documentation).
struct MultiplicativeLROptions {
  using Scheduler = MultiplicativeLR;

  // A function from the epoch to a factor, or a list with one for each
  // parameter group. It must return the same on all ranks. Required.
  internal::LRLambdas lr_lambda{};
};

// Multiplies the rates in every epoch but the first by a function of the epoch.
// A state does not hold the functions: construct the scheduler with the same
// ones before loading.
class MultiplicativeLR final : public internal::FormulaScheduler {
 public:
  MultiplicativeLR(torch::optim::Optimizer& optimizer,
                   const MultiplicativeLROptions& options)
      : MultiplicativeLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                         options) {}
  template <class = void>
  explicit MultiplicativeLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  MultiplicativeLR(internal::SchedulerGroupsPtr groups,
                   const MultiplicativeLROptions& options);

 private:
  std::vector<double> get_lr() override;
  void check(size_t group) const override;
  void list_state(internal::StateFields& fields) override;

  internal::LRLambdas lambdas_;
};

}  // namespace lockstep::optim
