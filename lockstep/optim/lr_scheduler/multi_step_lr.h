#pragma once

#include <vector>

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"

namespace lockstep::optim {

class MultiStepLR;

// The arguments of torch.optim.lr_scheduler.MultiStepLR (PyTorch
// documentation).
struct MultiStepLROptions {
  using Scheduler = MultiStepLR;

  // The epochs in which the rates decay, in any order; an epoch that is named
  // twice decays twice. Required, but may be empty.
  std::vector<int64_t> milestones{};

  // The factor of each decay.
  double gamma{0.1};
};

// Multiplies the rates by gamma in each of the milestones.
class MultiStepLR final : public internal::FormulaScheduler {
 public:
  MultiStepLR(torch::optim::Optimizer& optimizer,
              const MultiStepLROptions& options)
      : MultiStepLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                    options) {}
  template <class = void>
  explicit MultiStepLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  MultiStepLR(internal::SchedulerGroupsPtr groups,
              const MultiStepLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  StateTree::Counter milestones_;
  double gamma_;
};

}  // namespace lockstep::optim
