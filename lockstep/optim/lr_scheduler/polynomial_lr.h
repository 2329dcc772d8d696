#pragma once

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"

namespace lockstep::optim {

class PolynomialLR;

// The arguments of torch.optim.lr_scheduler.PolynomialLR (PyTorch
// documentation).
struct PolynomialLROptions {
  using Scheduler = PolynomialLR;

  // The epoch in which the rates reach 0.
  int64_t total_iters{5};

  // See PolynomialLR.
  double power{1.0};
};

// Multiplies the initial rates by (1 - epoch / total_iters) to the power of
// `power`, until epoch total_iters.
class PolynomialLR final : public internal::FormulaScheduler {
 public:
  explicit PolynomialLR(torch::optim::Optimizer& optimizer,
                        const PolynomialLROptions& options = {})
      : PolynomialLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                     options) {}
  template <class = void>
  explicit PolynomialLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  PolynomialLR(internal::SchedulerGroupsPtr groups,
               const PolynomialLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  int64_t total_iters_;
  double power_;
};

}  // namespace lockstep::optim
