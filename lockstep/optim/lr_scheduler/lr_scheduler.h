#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/optim/lr_scheduler/scheduler_state.h"
#include "lockstep/state/resumable_scheduler.h"

namespace lockstep::optim {

// How OneCycleLR and SWALR go from one rate to another: along half a cosine or
// along a line.
enum class AnnealStrategy { cos, linear };

// An option of a scheduler for the optimizer's parameter groups: one number for
// all groups, or a list with one for each.
//
//   .max_lr = 0.1
//   .max_lr = {0.1, 0.01}
class PerGroup {
 public:
  PerGroup() = default;  // not given
  PerGroup(double value) : values_{value}, for_all_(true) {}
  PerGroup(std::initializer_list<double> values)
      : PerGroup(std::vector<double>(values)) {}
  PerGroup(std::vector<double> values) : values_(std::move(values)) {}

  bool is_one_for_all() const { return for_all_; }
  const std::vector<double>& values() const { return values_; }

  // Returns the number of one group. Throws std::invalid_argument that names
  // `option` ("OneCycleLR: max_lr") unless the option is one number or a list
  // of `groups` numbers.
  double of(size_t group, size_t groups, const char* option) const;

 private:
  std::vector<double> values_;
  bool for_all_ = false;
};

// The learning-rate schedulers follow torch.optim.lr_scheduler (PyTorch
// documentation, "torch.optim", How to adjust learning rate): names, defaults
// and meaning of the options, and the learning rates of every step, which are
// Python's bit for bit. A state can be exchanged with Python.
//
//   optim::SGD optimizer(model->parameters(), {.lr = 0.1});
//   optim::CosineAnnealingLR scheduler(optimizer, {.T_max = epochs});
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     ... train, with optimizer.step() for each batch ...
//     scheduler.step();
//   }
//
// This holds for all of them:
// - The optimizer is any of LibTorch's, Lockstep's, or a
//   ZeroRedundancyOptimizer, of which the scheduler sets the learning rates in
//   param_groups(). For a PostLocalSGDOptimizer give its optim() if momentum is
//   cycled. The optimizer must outlive the scheduler, and its groups must have
//   options with a learning rate.
// - Nothing is communicated. Every rank has a scheduler of its own and steps it
//   as often as the others.
// - The constructor sets the learning rates of the first step, as in Python. It
//   throws std::invalid_argument for options that make no sense.
// - Groups may have different rates. A group that is added to the optimizer
//   later takes part from the next step() on: a formula that starts from the
//   initial rate starts from the rate that the group has at that step, and a
//   formula that multiplies the rate before multiplies that of the group, too.
//   step() throws std::invalid_argument, and changes nothing, if an option is a
//   list that has no value for the new group.
// - Python keeps a group's initial rate in the optimizer, where the first
//   scheduler puts it; LibTorch's optimizers have no place for it. Here the
//   parts of a SequentialLR or ChainedScheduler share the initial rates, and
//   any other scheduler takes the rates at its construction.
// - Python's `last_epoch` argument does not exist: to go on, load a state.
//
// Threads: one at a time.
class LRScheduler : public ResumableScheduler {
 public:
  // Sets the learning rates of the next epoch, or of the next step if the
  // options count steps. Call it after the optimizer's step().
  virtual void step() = 0;

  // Returns the learning rate of each group as this scheduler has set them
  // last.
  const std::vector<double>& get_last_lr() const { return last_lr_; }

  // Returns how often step() was called; a part of a SequentialLR counts from
  // the step in which it became active.
  virtual int64_t last_epoch() const { return last_epoch_; }

  // See ResumableScheduler. The state is Python's state_dict() of the scheduler
  // with the same name, with the additional item `param_groups`.
  StateTree state_dict() const override;
  std::function<void()> prepare_load(const StateTree& state) override;

 protected:
  friend class ChainedScheduler;
  friend class SequentialLR;

  LRScheduler(internal::SchedulerGroupsPtr groups, const char* name)
      : name_(name), groups_(std::move(groups)) {}

  // Adds what state_dict() has.
  virtual void list_state(internal::StateFields& fields);
  internal::StateFields state_fields();

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

  const char* const name_;  // "StepLR"
  internal::SchedulerGroupsPtr groups_;
  int64_t last_epoch_ = -1;
  std::vector<double> last_lr_;
};

}  // namespace lockstep::optim

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
