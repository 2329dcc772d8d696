#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

class CyclicLR;

// How the height of CyclicLR's cycles changes: not at all; halved in each
// cycle; multiplied by gamma in each step.
enum class CyclicMode { triangular, triangular2, exp_range };

// The argument of CyclicLROptions::scale_fn.
enum class CyclicScaleMode { cycle, iterations };

// The arguments of torch.optim.lr_scheduler.CyclicLR (PyTorch documentation).
struct CyclicLROptions {
  using Scheduler = CyclicLR;

  // ---- Learning rates ----

  // The rates between which the cycles go. Required.
  PerGroup base_lr{};
  PerGroup max_lr{};

  // The number of steps in which the rate rises, and in which it falls; above
  // 0. None means as many as step_size_up.
  int64_t step_size_up{2000};
  std::optional<int64_t> step_size_down{};

  // How the height of the cycles changes.
  CyclicMode mode{CyclicMode::triangular};

  // For exp_range.
  double gamma{1.0};

  // Scales the height of the cycles instead of `mode`: a function of the number
  // of the cycle, from 1, or of the step, from 0, as scale_mode says. A state
  // does not hold it.
  std::function<double(double)> scale_fn{};
  CyclicScaleMode scale_mode{CyclicScaleMode::cycle};

  // ---- Momentum ----

  // As OneCycleLROptions::cycle_momentum.
  bool cycle_momentum{true};

  // The momenta between which the cycles go.
  PerGroup base_momentum = 0.8;
  PerGroup max_momentum = 0.9;
};

// Lets the rates go up and down between two bounds: Smith, "Cyclical Learning
// Rates for Training Neural Networks" (WACV 2017). Call step() after each
// batch. The rates that the groups had before do not count.
class CyclicLR final : public internal::FormulaScheduler {
 public:
  CyclicLR(torch::optim::Optimizer& optimizer, const CyclicLROptions& options)
      : CyclicLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                 options) {}
  template <class = void>
  explicit CyclicLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  CyclicLR(internal::SchedulerGroupsPtr groups, const CyclicLROptions& options);

  std::function<void()> prepare_load(const StateTree& state) override;

 private:
  // A group's numbers in the options.
  struct Ends {
    double base_lr = 0;
    double max_lr = 0;
    double base_momentum = 0;
    double max_momentum = 0;
  };

  Ends ends_of(size_t group) const;
  double scale(double cycle) const;
  std::vector<double> get_lr() override;
  void check(size_t group) const override;
  void adopt(size_t group) override;
  void list_state(internal::StateFields& fields) override;
  double base_lr_of(size_t group) override;

  CyclicLROptions options_;
  double total_size_ = 0;
  double step_ratio_ = 0;
  CyclicMode mode_;
  double gamma_;
  CyclicScaleMode scale_mode_;
  bool is_constructed_ = false;
  std::vector<double> max_lrs_;
  std::vector<double> base_momentums_;
  std::vector<double> max_momentums_;
};

class OneCycleLR;

// The arguments of torch.optim.lr_scheduler.OneCycleLR (PyTorch documentation).
struct OneCycleLROptions {
  using Scheduler = OneCycleLR;

  // ---- Learning rates ----

  // The highest rate. Required.
  PerGroup max_lr{};

  // The number of steps of the cycle; 0 means epochs * steps_per_epoch. One of
  // the two is required.
  int64_t total_steps{0};
  int64_t epochs{0};
  int64_t steps_per_epoch{0};

  // The part of the cycle in which the rate rises, from 0 to 1.
  double pct_start{0.3};

  // The shape of the rise and of the fall.
  AnnealStrategy anneal_strategy{AnnealStrategy::cos};

  // The first rate is max_lr / div_factor, and the last one the first rate /
  // final_div_factor.
  double div_factor{25.0};
  double final_div_factor{1e4};

  // Whether the rate falls to the first one as fast as it has risen, and to the
  // last one in a third phase. If not, the cycle has two phases.
  bool three_phase{false};

  // ---- Momentum ----

  // Whether the momentum (SGD, RMSprop) or beta1 (Adam, AdamW) falls from
  // max_momentum to base_momentum while the rate rises, and the other way
  // round. Other optimizers need false.
  bool cycle_momentum{true};

  // The momenta between which the cycle goes.
  PerGroup base_momentum = 0.85;
  PerGroup max_momentum = 0.95;
};

// One cycle of rates over the whole training: Smith and Topin,
// "Super-Convergence: Very Fast Training of Neural Networks Using Large
// Learning Rates" (2018). Call step() after each batch. The rates that the
// groups had before do not count.
//
// step() throws std::invalid_argument if it is called more than total_steps
// times.
class OneCycleLR final : public internal::FormulaScheduler {
 public:
  OneCycleLR(torch::optim::Optimizer& optimizer,
             const OneCycleLROptions& options)
      : OneCycleLR(std::make_shared<internal::SchedulerGroups>(optimizer),
                   options) {}
  template <class = void>
  explicit OneCycleLR(  // no such option
      torch::optim::Optimizer&, ...) = delete;
  OneCycleLR(internal::SchedulerGroupsPtr groups,
             const OneCycleLROptions& options);

 private:
  // The texts are names of a group's numbers (SchedulerGroups::values()).
  struct Phase {
    double end_step = 0;
    std::string start_lr{};
    std::string end_lr{};
    std::string start_momentum{};
    std::string end_momentum{};
  };

  // A group's numbers in the options.
  struct Peaks {
    double max_lr = 0;
    double max_momentum = 0;
    double base_momentum = 0;
  };

  Peaks peaks_of(size_t group) const;
  double anneal(double from, double to, double part) const;
  std::vector<double> get_lr() override;
  void check(size_t group) const override;
  void adopt(size_t group) override;
  void list_state(internal::StateFields& fields) override;
  StateTree phases_state() const;
  std::vector<Phase> phases_of(const StateTree& state) const;

  OneCycleLROptions options_;
  int64_t total_steps_;
  AnnealStrategy strategy_;
  std::vector<Phase> phases_;
};

}  // namespace lockstep::optim
