#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

// How the height of CyclicLR's cycles changes: not at all; halved in each
// cycle; multiplied by gamma in each step.
enum class CyclicMode { triangular, triangular2, exp_range };

// The argument of CyclicLROptions::scale_fn.
enum class CyclicScaleMode { cycle, iterations };

// The arguments of torch.optim.lr_scheduler.CyclicLR (PyTorch documentation).
struct CyclicLROptions {
  // ---- Learning rates ----

  // The rates between which the cycles go.
  PerGroup<double> base_lr;
  PerGroup<double> max_lr;

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
  PerGroup<double> base_momentum = 0.8;
  PerGroup<double> max_momentum = 0.9;
};

// Lets the rates go up and down between two bounds: Smith, "Cyclical Learning
// Rates for Training Neural Networks" (WACV 2017). Call step() after each
// batch. The rates that the groups had before do not count.
using CyclicLR = SchedulerWith<CyclicLROptions>;

// The arguments of torch.optim.lr_scheduler.OneCycleLR (PyTorch documentation).
struct OneCycleLROptions {
  // ---- Learning rates ----

  // The highest rate.
  PerGroup<double> max_lr;

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
  PerGroup<double> base_momentum = 0.85;
  PerGroup<double> max_momentum = 0.95;
};

// One cycle of rates over the whole training: Smith and Topin,
// "Super-Convergence: Very Fast Training of Neural Networks Using Large
// Learning Rates" (2018). Call step() after each batch. The rates that the
// groups had before do not count.
//
// step() throws std::invalid_argument if it is called more than total_steps
// times.
using OneCycleLR = SchedulerWith<OneCycleLROptions>;

}  // namespace lockstep::optim
