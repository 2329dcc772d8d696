#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/optim/lr_scheduler/schedule.h"

namespace lockstep::optim {

class SequentialLR;

// The arguments of torch.optim.lr_scheduler.SequentialLR (PyTorch
// documentation).
struct SequentialLROptions {
  using Scheduler = SequentialLR;

  // The schedulers, in their order; at least one. Only the first may be a
  // SequentialLR or ChainedScheduler (Python fails when it comes to another).
  // Required.
  std::vector<Schedule> schedulers{};

  // The epochs in which the second and the following schedulers begin, in
  // ascending order; one less than schedulers. Required.
  std::vector<int64_t> milestones{};
};

// One scheduler after another:
//
//   optim::SequentialLR scheduler(
//       optimizer,
//       {.schedulers = {optim::LinearLROptions{.start_factor = 0.1,
//                                              .total_iters = 5},
//                       optim::CosineAnnealingLROptions{.T_max = 95}},
//        .milestones = {5}});
//
// A scheduler begins at its epoch 0, from the initial rates if it has a closed
// formula (StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR,
// PolynomialLR and CosineAnnealingLR have), otherwise as its get_lr() does.
//
// A SequentialLR that is the first scheduler of another one is an epoch ahead,
// as in Python; list its schedulers in the outer one instead.
class SequentialLR final : public LRScheduler {
 public:
  SequentialLR(torch::optim::Optimizer& optimizer,
               const SequentialLROptions& options)
      : SequentialLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                     options) {}
  template <class = void>
  explicit SequentialLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  SequentialLR(internal::SchedulerGroupsPtr groups,
               const SequentialLROptions& options);

  void step() override;

 private:
  void list_state(internal::StateFields& fields) override;
  void initial_step() override;
  void undo_step() override;
  void begin() override;
  void check_groups() const override;
  size_t active(int64_t epoch) const;

  std::vector<std::unique_ptr<LRScheduler>> schedulers_;
  std::vector<int64_t> milestones_;
};

}  // namespace lockstep::optim
