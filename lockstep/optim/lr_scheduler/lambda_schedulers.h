#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"
#include "lockstep/optim/lr_scheduler/scheduler_state.h"

namespace lockstep::internal {

// The functions of LambdaLR and MultiplicativeLR: one for all parameter groups,
// or a list with one for each.
//
//   .lr_lambda = [](int64_t epoch) { return 1.0 / (1 + epoch); }
//   .lr_lambda = {first, second}
class LRLambdas {
 public:
  using Function = std::function<double(int64_t epoch)>;

  LRLambdas() = default;  // not given
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, LRLambdas> &&
             std::is_invocable_r_v<double, F&, int64_t>)
  LRLambdas(F function) : functions_{std::move(function)}, for_all_(true) {}
  LRLambdas(std::initializer_list<Function> functions)
      : LRLambdas(std::vector<Function>(functions)) {}
  LRLambdas(std::vector<Function> functions)
      : functions_(std::move(functions)) {}

  // Throws std::invalid_argument, naming `scheduler`, unless there is a
  // function for each of `groups` groups.
  void require(size_t groups, const char* scheduler) const;

  // Returns the factor of a group; require() was called.
  double factor(size_t group, int64_t epoch) const {
    return functions_[for_all_ ? 0 : group](epoch);
  }

  // Adds Python's `lr_lambdas`, which has None for each function: functions are
  // not saved.
  static void list_state(StateFields& fields, size_t groups);

 private:
  std::vector<Function> functions_;
  bool for_all_ = false;
};

}  // namespace lockstep::internal

namespace lockstep::optim {

class LambdaLR;

// The arguments of torch.optim.lr_scheduler.LambdaLR (PyTorch documentation).
struct LambdaLROptions {
  using Scheduler = LambdaLR;

  // A function from the epoch to a factor, or a list with one for each
  // parameter group. It must return the same on all ranks. Required.
  internal::LRLambdas lr_lambda{};
};

// Sets the rates to the initial ones times a function of the epoch.
// A state does not hold the functions: construct the scheduler with the same
// ones before loading.
class LambdaLR final : public internal::FormulaScheduler {
 public:
  LambdaLR(torch::optim::Optimizer& optimizer, const LambdaLROptions& options)
      : LambdaLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                 options) {}
  template <class = void>
  explicit LambdaLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  LambdaLR(internal::SchedulerGroupsPtr groups, const LambdaLROptions& options);

 private:
  std::vector<double> get_lr() override;
  void check(size_t group) const override;
  void list_state(internal::StateFields& fields) override;

  internal::LRLambdas lambdas_;
};

class MultiplicativeLR;

// The arguments of torch.optim.lr_scheduler.MultiplicativeLR (PyTorch
// documentation).
struct MultiplicativeLROptions {
  using Scheduler = MultiplicativeLR;

  // A function from the epoch to a factor, or a list with one for each
  // parameter group. It must return the same on all ranks. Required.
  internal::LRLambdas lr_lambda{};
};

// Multiplies the rates in every epoch but the first by a function of the epoch.
// A state does not hold the functions: construct the scheduler with the same
// ones before loading.
class MultiplicativeLR final : public internal::FormulaScheduler {
 public:
  MultiplicativeLR(torch::optim::Optimizer& optimizer,
                   const MultiplicativeLROptions& options)
      : MultiplicativeLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                         options) {}
  template <class = void>
  explicit MultiplicativeLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  MultiplicativeLR(internal::SchedulerGroupsPtr groups,
                   const MultiplicativeLROptions& options);

 private:
  std::vector<double> get_lr() override;
  void check(size_t group) const override;
  void list_state(internal::StateFields& fields) override;

  internal::LRLambdas lambdas_;
};

}  // namespace lockstep::optim
