#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/state/resumable_scheduler.h"

namespace lockstep::internal {

class SchedulerGroups;
class SchedulerRule;

}  // namespace lockstep::internal

namespace lockstep::optim {

// How OneCycleLR and SWALR go from one rate to another: along half a cosine or
// along a line.
enum class AnnealStrategy { cos, linear };

// A function from the epoch to a factor of the learning rate.
using LRLambda = std::function<double(int64_t epoch)>;

// An option of a scheduler for the optimizer's parameter groups: one value for
// all groups, or a list with one for each. T is double or LRLambda.
//
//   .max_lr = 0.1
//   .max_lr = {0.1, 0.01}
template <class T>
class PerGroup {
 public:
  PerGroup() = delete;
  template <std::convertible_to<T> Value>
  PerGroup(Value value) : values_{T(std::move(value))}, for_all_(true) {}
  PerGroup(std::initializer_list<T> values) : values_(values) {}
  PerGroup(std::vector<T> values) : values_(std::move(values)) {}

  bool is_one_for_all() const { return for_all_; }
  const std::vector<T>& values() const { return values_; }

  // Returns the value of one group. Throws std::invalid_argument that names
  // `option` ("OneCycleLR: max_lr") unless the option is one value or a list
  // of `groups` values.
  const T& of(size_t group, size_t groups, const char* option) const;

 private:
  std::vector<T> values_;
  bool for_all_ = false;
};

struct ChainedSchedulerOptions;
struct ConstantLROptions;
struct CosineAnnealingLROptions;
struct CosineAnnealingWarmRestartsOptions;
struct CyclicLROptions;
struct ExponentialLROptions;
struct LambdaLROptions;
struct LinearLROptions;
struct MultiStepLROptions;
struct MultiplicativeLROptions;
struct OneCycleLROptions;
struct PolynomialLROptions;
struct SWALROptions;
struct SequentialLROptions;
struct StepLROptions;

// The options of any scheduler except ReduceLROnPlateau. It is a part of a
// SequentialLR or ChainedScheduler, which makes the scheduler:
//
//   std::vector<Schedule> schedulers{LinearLROptions{.total_iters = 10},
//                                    ExponentialLROptions{.gamma = 0.9}};
class Schedule {
 public:
  Schedule(const ChainedSchedulerOptions& options);
  Schedule(const ConstantLROptions& options);
  Schedule(const CosineAnnealingLROptions& options);
  Schedule(const CosineAnnealingWarmRestartsOptions& options);
  Schedule(const CyclicLROptions& options);
  Schedule(const ExponentialLROptions& options);
  Schedule(const LambdaLROptions& options);
  Schedule(const LinearLROptions& options);
  Schedule(const MultiStepLROptions& options);
  Schedule(const MultiplicativeLROptions& options);
  Schedule(const OneCycleLROptions& options);
  Schedule(const PolynomialLROptions& options);
  Schedule(const SWALROptions& options);
  Schedule(const SequentialLROptions& options);
  Schedule(const StepLROptions& options);

 private:
  friend class internal::SchedulerRule;

  using Groups = std::shared_ptr<internal::SchedulerGroups>;
  std::function<std::unique_ptr<internal::SchedulerRule>(const Groups&)> make_;
  bool is_composite_ = false;
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
  ~LRScheduler() override;

  // Sets the learning rates of the next epoch, or of the next step if the
  // options count steps. Call it after the optimizer's step().
  void step();

  // Returns the learning rate of each group as this scheduler has set them
  // last.
  const std::vector<double>& get_last_lr() const;

  // Returns how often step() was called; a part of a SequentialLR counts from
  // the step in which it became active.
  int64_t last_epoch() const;

  // See ResumableScheduler. The state is Python's state_dict() of the scheduler
  // with the same name, with the additional item `param_groups`.
  StateTree state_dict() const override;
  std::function<void()> prepare_load(const StateTree& state) override;

 protected:
  LRScheduler(torch::optim::Optimizer& optimizer, const Schedule& schedule);

 private:
  std::unique_ptr<internal::SchedulerRule> rule_;
};

// The scheduler with these options; StepLR is SchedulerWith<StepLROptions>.
template <class Options>
class SchedulerWith final : public LRScheduler {
 public:
  explicit SchedulerWith(torch::optim::Optimizer& optimizer,
                         const Options& options = {})
      : LRScheduler(optimizer, options) {}
  template <class = void>
  explicit SchedulerWith(  // no such option
      torch::optim::Optimizer&, ...) = delete;
};

}  // namespace lockstep::optim
