#pragma once

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"
#include "lockstep/optim/lr_scheduler/lr_lambdas.h"

namespace lockstep::optim {

class LambdaLR;

// The arguments of torch.optim.lr_scheduler.LambdaLR (PyTorch documentation).
struct LambdaLROptions {
  using Scheduler = LambdaLR;

  // A function from the epoch to a factor, or a list with one for each
  // parameter group. It must return the same on all ranks. Required.
  internal::LRLambdas lr_lambda{};
};

// Sets the rates to the initial ones times a function of the epoch.
// A state does not hold the functions: construct the scheduler with the same
// ones before loading.
class LambdaLR final : public internal::FormulaScheduler {
 public:
  LambdaLR(torch::optim::Optimizer& optimizer, const LambdaLROptions& options)
      : LambdaLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                 options) {}
  template <class = void>
  explicit LambdaLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  LambdaLR(internal::SchedulerGroupsPtr groups, const LambdaLROptions& options);

 private:
  std::vector<double> get_lr() override;
  void check(size_t group) const override;
  void list_state(internal::StateFields& fields) override;

  internal::LRLambdas lambdas_;
};

}  // namespace lockstep::optim
