#pragma once

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

class SWALR;

// The arguments of torch.optim.swa_utils.SWALR (PyTorch documentation, Weight
// Averaging).
struct SWALROptions {
  using Scheduler = SWALR;

  // The rate to go to. Required.
  PerGroup swa_lr{};

  // The number of epochs in which it is reached; 0 or more.
  int64_t anneal_epochs{10};

  // The shape of the way to it.
  AnnealStrategy anneal_strategy{AnnealStrategy::cos};
};

// Goes from the present rates to a constant one, at which weights are averaged:
// Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
// Generalization" (UAI 2018). It may be constructed before training beside
// another scheduler, and stepped instead of that from some epoch on: it starts
// from the rates that it then finds.
class SWALR final : public internal::FormulaScheduler {
 public:
  SWALR(torch::optim::Optimizer& optimizer, const SWALROptions& options)
      : SWALR(std::make_shared<internal::SchedulerGroups>(optimizer), options) {
  }
  template <class = void>
  explicit SWALR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  SWALR(internal::SchedulerGroupsPtr groups, const SWALROptions& options);

 private:
  double annealed(int64_t step) const;
  double swa_lr_of(size_t group) const;
  std::vector<double> get_lr() override;
  void check(size_t group) const override;
  void adopt(size_t group) override;
  void list_state(internal::StateFields& fields) override;

  PerGroup swa_lr_;
  int64_t anneal_epochs_;
  AnnealStrategy strategy_;
};

}  // namespace lockstep::optim
