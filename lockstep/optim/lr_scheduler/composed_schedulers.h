#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

class ChainedScheduler;
class SequentialLR;

// The options of any scheduler except ReduceLROnPlateau, as a part of a
// SequentialLR or ChainedScheduler, which makes the scheduler:
//
//   std::vector<Schedule> schedulers{LinearLROptions{.total_iters = 10},
//                                    ExponentialLROptions{.gamma = 0.9}};
class Schedule {
 public:
  template <class Options>
    requires std::derived_from<typename Options::Scheduler, LRScheduler>
  Schedule(Options options)
      : make_([options = std::move(options)](
                  const internal::SchedulerGroupsPtr& groups)
                  -> std::unique_ptr<LRScheduler> {
          return std::make_unique<typename Options::Scheduler>(groups, options);
        }),
        is_composite_(
            std::same_as<typename Options::Scheduler, ChainedScheduler> ||
            std::same_as<typename Options::Scheduler, SequentialLR>) {}

 private:
  friend class ChainedScheduler;
  friend class SequentialLR;

  std::function<std::unique_ptr<LRScheduler>(
      const internal::SchedulerGroupsPtr&)>
      make_;
  bool is_composite_;
};

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
