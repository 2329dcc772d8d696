#pragma once

#include <cstdint>

namespace lockstep {

// Which steps of a training a Profiler records, as torch.profiler.schedule
// (PyTorch documentation, "torch.profiler"). The first `skip_first` steps are
// left out. Then cycles follow, each of `wait` steps that are left out,
// `warmup` steps in which Kineto prepares to record, and `active` steps that
// are recorded. At the end of a cycle its trace is written.
struct ProfilerSchedule {
  // Zero or more.
  int64_t wait{0};
  // Zero or more. With 1, what Kineto does at its first start is not recorded.
  // (In Python it must be given.)
  int64_t warmup{1};
  // One or more.
  int64_t active{1};
  // How many cycles there are. 0 means no limit.
  int64_t repeat{0};
  // Zero or more.
  int64_t skip_first{0};
  // Whether the first cycle has no `wait` steps.
  bool skip_first_wait{false};
};

// The action of a Profiler in one step; torch.profiler.ProfilerAction.
enum class ProfilerAction {
  none,
  warmup,
  record,
  record_and_save,  // records, and writes the trace at the end of the step
};

// Returns what the schedule says of step `step`; the first step is 0. Throws
// std::invalid_argument if `step` or a member of `schedule` is out of its
// range.
ProfilerAction action_at(const ProfilerSchedule& schedule, int64_t step);

}  // namespace lockstep
