#pragma once

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

class CosineAnnealingLR;

// The arguments of torch.optim.lr_scheduler.CosineAnnealingLR (PyTorch
// documentation).
struct CosineAnnealingLROptions {
  using Scheduler = CosineAnnealingLR;

  // The epoch in which the rates reach eta_min; 1 or more.
  // After it the rates rise again. Required.
  int64_t T_max{0};

  // The lowest rate.
  double eta_min{0};
};

// Lets the rates fall from the initial ones to eta_min along half a cosine:
// Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts"
// (ICLR 2017), equation 5, without restarts.
class CosineAnnealingLR final : public internal::FormulaScheduler {
 public:
  CosineAnnealingLR(torch::optim::Optimizer& optimizer,
                    const CosineAnnealingLROptions& options)
      : CosineAnnealingLR(
            std::make_shared<internal::SchedulerGroups>(optimizer), options) {}
  template <class = void>
  explicit CosineAnnealingLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  CosineAnnealingLR(internal::SchedulerGroupsPtr groups,
                    const CosineAnnealingLROptions& options);

 private:
  std::vector<double> get_lr() override;
  std::vector<double> first_lr() override;
  void list_state(internal::StateFields& fields) override;

  int64_t t_max_;
  double eta_min_;
};

class CosineAnnealingWarmRestarts;

// The arguments of torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
// (PyTorch documentation).
struct CosineAnnealingWarmRestartsOptions {
  using Scheduler = CosineAnnealingWarmRestarts;

  // The number of epochs until the first restart; 1 or more.
  // Required.
  int64_t T_0{0};

  // The factor by which each period is longer than the one before; 1 or more.
  int64_t T_mult{1};

  // The rate before a restart.
  double eta_min{0};
};

// Lets the rates fall from the initial ones to eta_min along half a cosine, and
// then begins again: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent
// with Warm Restarts" (ICLR 2017), equation 5. Python's step(epoch), with a
// fraction of an epoch, does not exist here: count steps instead.
class CosineAnnealingWarmRestarts final : public internal::FormulaScheduler {
 public:
  CosineAnnealingWarmRestarts(torch::optim::Optimizer& optimizer,
                              const CosineAnnealingWarmRestartsOptions& options)
      : CosineAnnealingWarmRestarts(
            std::make_shared<internal::SchedulerGroups>(optimizer), options) {}
  template <class = void>
  explicit CosineAnnealingWarmRestarts(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  CosineAnnealingWarmRestarts(
      internal::SchedulerGroupsPtr groups,
      const CosineAnnealingWarmRestartsOptions& options);

  void step() override;

 private:
  std::vector<double> get_lr() override;
  void list_state(internal::StateFields& fields) override;

  int64_t t_0_;
  int64_t t_mult_;
  double eta_min_;
  int64_t t_i_;         // epochs of the present period
  int64_t t_cur_ = -1;  // epochs since its beginning
};

}  // namespace lockstep::optim
