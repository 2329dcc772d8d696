#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"
#include "lockstep/optim/lr_scheduler/scheduler_state.h"

namespace lockstep::internal {

// The rule by which a scheduler sets the rates. An optim::LRScheduler has one;
// the parts of a SequentialLR or ChainedScheduler are such rules, too.
// Functions whose contract is not here are those of LRScheduler with the same
// name.
class SchedulerRule {
 public:
  // `name`: that of the scheduler, such as "StepLR".
  SchedulerRule(SchedulerGroupsPtr groups, const char* name)
      : name_(name), groups_(std::move(groups)) {}
  virtual ~SchedulerRule() = default;
  SchedulerRule(const SchedulerRule&) = delete;
  SchedulerRule& operator=(const SchedulerRule&) = delete;

  static std::unique_ptr<SchedulerRule> make(const optim::Schedule& schedule,
                                             const SchedulerGroupsPtr& groups) {
    return schedule.make_(groups);
  }
  // Returns whether these are the options of a SequentialLR or
  // ChainedScheduler.
  static bool is_composite(const optim::Schedule& schedule) {
    return schedule.is_composite_;
  }

  virtual void step() = 0;
  const std::vector<double>& last_lr() const { return last_lr_; }
  virtual int64_t last_epoch() const { return last_epoch_; }
  StateTree state_dict() const;
  virtual std::function<void()> prepare_load(const StateTree& state);
  StateFields state_fields();

  // The following three are the parts of Python's SequentialLR that reach into
  // its schedulers. The first sets the rates of epoch 0, as the constructor
  // does. The second takes back the count of the constructor's step. The third
  // begins at epoch 0 by a formula that does not use the present rates.
  virtual void initial_step() = 0;
  virtual void undo_step() { --last_epoch_; }
  virtual void begin() = 0;

  // Throws std::invalid_argument if step() would because of the groups that the
  // optimizer has now.
  virtual void check_groups() const = 0;

 protected:
  // Adds what state_dict() has.
  virtual void list_state(StateFields& fields);

  const char* const name_;
  SchedulerGroupsPtr groups_;
  int64_t last_epoch_ = -1;
  std::vector<double> last_lr_;
};

// Returns what makes a Rule with these options.
template <class Rule, class Options>
auto rule_maker(const Options& options) {
  return
      [options](
          const SchedulerGroupsPtr& groups) -> std::unique_ptr<SchedulerRule> {
        return std::make_unique<Rule>(groups, options);
      };
}

// A rule that computes the rates of an epoch by a formula. A class that derives
// from it calls start() at the end of its constructor.
class FormulaRule : public SchedulerRule {
 public:
  // If the formula throws, the scheduler is as before.
  void step() override;
  void initial_step() override;
  void begin() override;
  void check_groups() const override;

 protected:
  using SchedulerRule::SchedulerRule;

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
  void set(const std::vector<double>& rates);
  void adopt_groups();

  std::vector<double> base_lrs_;  // the initial rates
  // The groups' momenta that get_lr() has found, which set() sets together with
  // the rates; empty if they are not cycled.
  std::vector<double> momenta_;
  int64_t step_count_ = 0;
  bool is_initial_ = false;  // within initial_step()
};

}  // namespace lockstep::internal
