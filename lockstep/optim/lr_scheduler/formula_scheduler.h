#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::internal {

// A scheduler that computes the rates of an epoch by a formula. A class that
// derives from it calls start() at the end of its constructor.
class FormulaScheduler : public optim::LRScheduler {
 public:
  // If the formula throws, the scheduler is as before.
  void step() override;

 protected:
  using LRScheduler::LRScheduler;

  void start();

  // Returns the rate of each group in epoch last_epoch_.
  virtual std::vector<double> get_lr() = 0;
  // Returns the same for epoch 0, from the initial rates alone. This is the
  // value at 0 of what Python calls the closed form; the default is get_lr().
  virtual std::vector<double> first_lr() { return get_lr(); }
  // Throws std::invalid_argument if adopt() cannot prepare for the group.
  virtual void check(size_t group) const { static_cast<void>(group); }
  // Prepares for a group that the scheduler has not seen yet, after check().
  virtual void adopt(size_t group) { static_cast<void>(group); }
  // Returns what becomes the group's element of base_lrs_; called after
  // adopt().
  virtual double base_lr_of(size_t group) { return groups_->initial_lr(group); }

  // Return a formula's value for each group: the first from the present rate,
  // the second from the initial one.
  template <class Formula>
  std::vector<double> from_present(const Formula& formula) const {
    std::vector<double> rates = groups_->lrs();
    for (double& rate : rates) rate = formula(rate);
    return rates;
  }
  template <class Formula>
  std::vector<double> from_initial(const Formula& formula) const {
    std::vector<double> rates = base_lrs_;
    for (double& rate : rates) rate = formula(rate);
    return rates;
  }

  void list_state(StateFields& fields) override;
  void initial_step() override;
  void begin() override;
  void check_groups() const override;
  void set(const std::vector<double>& rates);
  void adopt_groups();

  std::vector<double> base_lrs_;  // the initial rates
  int64_t step_count_ = 0;
  bool is_initial_ = false;  // within initial_step()
};

}  // namespace lockstep::internal
