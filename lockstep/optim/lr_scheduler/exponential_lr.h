#pragma once

#include <optional>

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"

namespace lockstep::optim {

class ExponentialLR;

// The arguments of torch.optim.lr_scheduler.ExponentialLR (PyTorch
// documentation).
struct ExponentialLROptions {
  using Scheduler = ExponentialLR;

  // The factor of each epoch. Required.
  std::optional<double> gamma{};
};

// Multiplies the rates by gamma in every epoch.
class ExponentialLR final : public internal::FormulaScheduler {
 public:
  ExponentialLR(torch::optim::Optimizer& optimizer,
                const ExponentialLROptions& options)
      : ExponentialLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                      options) {}
  template <class = void>
  explicit ExponentialLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  ExponentialLR(internal::SchedulerGroupsPtr groups,
                const ExponentialLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  double gamma_;
};

}  // namespace lockstep::optim
