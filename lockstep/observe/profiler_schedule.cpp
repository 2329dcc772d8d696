#include "lockstep/observe/profiler_schedule.h"

#include <stdexcept>
#include <string>

namespace lockstep {
namespace {

void require_at_least(const char* name, int64_t value, int64_t least) {
  if (value >= least) return;
  throw std::invalid_argument("ProfilerSchedule: " + std::string(name) +
                              " is " + std::to_string(value) + "; it must be " +
                              std::to_string(least) + " or more");
}

}  // namespace

ProfilerAction action_at(const ProfilerSchedule& schedule, int64_t step) {
  require_at_least("wait", schedule.wait, 0);
  require_at_least("warmup", schedule.warmup, 0);
  require_at_least("active", schedule.active, 1);
  require_at_least("repeat", schedule.repeat, 0);
  require_at_least("skip_first", schedule.skip_first, 0);
  require_at_least("the step", step, 0);
  if (step < schedule.skip_first) return ProfilerAction::none;
  step -= schedule.skip_first;
  if (schedule.skip_first_wait) step += schedule.wait;
  const int64_t cycle = schedule.wait + schedule.warmup + schedule.active;
  if (schedule.repeat > 0 && step / cycle >= schedule.repeat) {
    return ProfilerAction::none;
  }
  const int64_t in_cycle = step % cycle;
  if (in_cycle < schedule.wait) return ProfilerAction::none;
  if (in_cycle < schedule.wait + schedule.warmup) return ProfilerAction::warmup;
  return in_cycle < cycle - 1 ? ProfilerAction::record
                              : ProfilerAction::record_and_save;
}

}  // namespace lockstep
