#pragma once

#include <memory>
#include <vector>

#include "lockstep/optim/lr_scheduler/schedule.h"

namespace lockstep::optim {

class ChainedScheduler;

// The arguments of torch.optim.lr_scheduler.ChainedScheduler (PyTorch
// documentation).
struct ChainedSchedulerOptions {
  using Scheduler = ChainedScheduler;

  // The schedulers, in their order; at least one. Required.
  std::vector<Schedule> schedulers{};
};

// Several schedulers, each of which changes the rates that the one before has
// set, in every step:
//
//   optim::ChainedScheduler scheduler(
//       optimizer,
//       {.schedulers = {optim::ConstantLROptions{.factor = 0.1,
//                                                .total_iters = 20},
//                       optim::ExponentialLROptions{.gamma = 0.9}}});
//
// That has a meaning if all but the first multiply the rates (StepLR,
// MultiStepLR, ConstantLR, LinearLR, ExponentialLR, PolynomialLR,
// MultiplicativeLR); the others would overwrite them.
class ChainedScheduler final : public LRScheduler {
 public:
  ChainedScheduler(torch::optim::Optimizer& optimizer,
                   const ChainedSchedulerOptions& options)
      : ChainedScheduler(std::make_shared<internal::SchedulerGroups>(optimizer),
                         options) {}
  template <class = void>
  explicit ChainedScheduler(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  ChainedScheduler(internal::SchedulerGroupsPtr groups,
                   const ChainedSchedulerOptions& options);

  void step() override;
  int64_t last_epoch() const override;

 private:
  friend class SequentialLR;
  using Parts = std::vector<std::unique_ptr<LRScheduler>>;

  // Adds Python's `_schedulers`, a list of the parts' states.
  static void list_parts(internal::StateFields& fields, const Parts& parts);

  void list_state(internal::StateFields& fields) override;
  void initial_step() override;
  void undo_step() override;
  void begin() override;
  void check_groups() const override;

  Parts schedulers_;
};

}  // namespace lockstep::optim
