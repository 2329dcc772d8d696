#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "lockstep/optim/lr_scheduler/formula_scheduler.h"
#include "lockstep/optim/lr_scheduler/per_group.h"

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

}  // namespace lockstep::optim
