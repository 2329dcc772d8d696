#pragma once

#include <functional>

#include "lockstep/state/state_tree.h"

namespace lockstep {

// A learning-rate scheduler as snapshots see it. All schedulers of
// lockstep::optim are resumable (lockstep/optim/lr_scheduler/lr_scheduler.h); a
// scheduler of your own becomes so by these two functions. Threads: one at a
// time.
class ResumableScheduler {
 public:
  ResumableScheduler() = default;
  ResumableScheduler(const ResumableScheduler&) = delete;
  ResumableScheduler& operator=(const ResumableScheduler&) = delete;
  virtual ~ResumableScheduler() = default;

  // Returns a dict with what Python's scheduler.state_dict() has, under
  // Python's names. Learning rates themselves are part of the optimizer's
  // state.
  //
  // In addition it may have `param_groups`: for each group of the optimizer the
  // dict of numbers that Python's scheduler keeps in optimizer.param_groups
  // ("initial_lr", "max_lr"), for which LibTorch's groups have no place.
  // Snapshots store those that have Python's names (listed in
  // docs/internals/snapshot-formats.md) where Python has them, in the
  // optimizer's state, and others in the scheduler's.
  //
  // Saving throws std::invalid_argument for what a snapshot would not give
  // back: more than about 30 levels of lists and dicts and, unless it is a .pt
  // file, a dict with an integer as a name, and the texts "inf", "-inf" and
  // "nan". An empty Counter comes back as an empty dict, except from a .pt
  // file.
  virtual StateTree state_dict() const = 0;

  // Makes every check for load_state_dict() and changes nothing. The function
  // that it returns loads `state`, does not throw, and must be called, if at
  // all, before the scheduler or its optimizer is used in another way.
  //
  // Throws std::invalid_argument if `state` is not one of such a scheduler.
  virtual std::function<void()> prepare_load(const StateTree& state) = 0;

  // Restores what state_dict() or Python has returned; hyperparameters, too, as
  // in Python. Restore the optimizer's state as well: many schedulers compute
  // the next learning rate from the one before. Throws what prepare_load()
  // throws; nothing has changed then.
  void load_state_dict(const StateTree& state) { prepare_load(state)(); }
};

}  // namespace lockstep
