#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <utility>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"

namespace lockstep::optim {

class ChainedScheduler;
class SequentialLR;

// The options of any scheduler except ReduceLROnPlateau, as a part of a
// SequentialLR or ChainedScheduler, which makes the scheduler:
//
//   std::vector<Schedule> schedulers{LinearLROptions{.total_iters = 10},
//                                    ExponentialLROptions{.gamma = 0.9}};
class Schedule {
 public:
  template <class Options>
    requires std::derived_from<typename Options::Scheduler, LRScheduler>
  Schedule(Options options)
      : make_([options = std::move(options)](
                  const internal::SchedulerGroupsPtr& groups)
                  -> std::unique_ptr<LRScheduler> {
          return std::make_unique<typename Options::Scheduler>(groups, options);
        }),
        is_composite_(
            std::same_as<typename Options::Scheduler, ChainedScheduler> ||
            std::same_as<typename Options::Scheduler, SequentialLR>) {}

 private:
  friend class ChainedScheduler;
  friend class SequentialLR;

  std::function<std::unique_ptr<LRScheduler>(
      const internal::SchedulerGroupsPtr&)>
      make_;
  bool is_composite_;
};

}  // namespace lockstep::optim
