#pragma once

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"

namespace lockstep::optim {

class LinearLR;

// The arguments of torch.optim.lr_scheduler.LinearLR (PyTorch documentation).
struct LinearLROptions {
  using Scheduler = LinearLR;

  // The factors of epoch 0 (above 0, at most 1) and of epoch total_iters (from
  // 0 to 1).
  double start_factor{1.0 / 3};
  double end_factor{1.0};

  // The epoch in which end_factor is reached.
  int64_t total_iters{5};
};

// Multiplies the rates by a factor that changes linearly from start_factor to
// end_factor, and then stays. As the first part of a SequentialLR this is a
// warm-up; scale_lr_linearly() makes the options for one.
class LinearLR final : public internal::FormulaScheduler {
 public:
  explicit LinearLR(torch::optim::Optimizer& optimizer,
                    const LinearLROptions& options = {})
      : LinearLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                 options) {}
  template <class = void>
  explicit LinearLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  LinearLR(internal::SchedulerGroupsPtr groups, const LinearLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  double start_factor_;
  double end_factor_;
  int64_t total_iters_;
};

}  // namespace lockstep::optim
