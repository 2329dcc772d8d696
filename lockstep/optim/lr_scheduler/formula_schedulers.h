#pragma once

#include <torch/optim/optimizer.h>

#include <optional>
#include <vector>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

class ConstantLR;

// The arguments of torch.optim.lr_scheduler.ConstantLR (PyTorch documentation).
struct ConstantLROptions {
  using Scheduler = ConstantLR;

  // The factor of the first epochs; above 0, at most 1. Python takes 0, too,
  // and then fails in epoch total_iters.
  double factor{1.0 / 3};

  // The number of these epochs.
  int64_t total_iters{5};
};

// Multiplies the rates by `factor` until epoch total_iters.
class ConstantLR final : public internal::FormulaScheduler {
 public:
  explicit ConstantLR(torch::optim::Optimizer& optimizer,
                      const ConstantLROptions& options = {})
      : ConstantLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                   options) {}
  template <class = void>
  explicit ConstantLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  ConstantLR(internal::SchedulerGroupsPtr groups,
             const ConstantLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  double factor_;
  int64_t total_iters_;
};

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

class StepLR;

// The arguments of torch.optim.lr_scheduler.StepLR (PyTorch documentation).
struct StepLROptions {
  using Scheduler = StepLR;

  // The number of epochs from one decay to the next; 1 or more. Required.
  int64_t step_size{0};

  // The factor of each decay.
  double gamma{0.1};
};

// Multiplies the rates by gamma every step_size epochs.
class StepLR final : public internal::FormulaScheduler {
 public:
  StepLR(torch::optim::Optimizer& optimizer, const StepLROptions& options)
      : StepLR(std::make_shared<internal::SchedulerGroups>(optimizer),
               options) {}
  template <class = void>
  explicit StepLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  // For a part of a SequentialLR or ChainedScheduler, as in all schedulers.
  StepLR(internal::SchedulerGroupsPtr groups, const StepLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  int64_t step_size_;
  double gamma_;
};

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

struct LinearScalingOptions {
  // How many times as large the batch of all ranks together is as the one for
  // which the optimizer's rates were chosen; above 0, or 0 for the world
  // size, with which each rank has the batch that one process had.
  double scale{0};

  // The number of steps of the warm-up. The paper takes those of five epochs.
  // Required.
  int64_t warmup_iters{0};
};

// The linear scaling rule with gradual warm-up (Goyal et al., "Accurate, Large
// Minibatch SGD: Training ImageNet in 1 Hour", 2017, sections 2.1 and 2.2): if
// the batch is k times as large, the learning rate is multiplied by k, and in
// the first steps it rises linearly from the old rate to the new one.
//
// Multiplies the rates of all groups, and returns the warm-up as the first part
// of a schedule that counts steps:
//
//   const auto warmup =
//       optim::scale_lr_linearly(optimizer, {.warmup_iters = 500});
//   optim::SequentialLR scheduler(
//       optimizer,
//       {.schedulers = {warmup, optim::CosineAnnealingLROptions{.T_max =
//       9500}},
//        .milestones = {warmup.total_iters}});
//
// Call it once, before the scheduler is made and before a snapshot is loaded.
// If the batch is smaller (k below 1) the rates need no warm-up: the returned
// one does nothing. The rule is for SGD; for Adam the square root of k is often
// taken as `scale`.
//
// Does not communicate. Throws std::invalid_argument for numbers out of range.
LinearLROptions scale_lr_linearly(torch::optim::Optimizer& optimizer,
                                  const LinearScalingOptions& options);

}  // namespace lockstep::optim
