#pragma once

#include <cstdint>
#include <string>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// The difference that must be added to a time of this rank's clock to get the
// time of the clock of the group's rank 0, and the most by which that may be
// wrong. In nanoseconds; both are 0 on rank 0.
struct ClockOffset {
  int64_t offset_ns = 0;
  int64_t uncertainty_ns = 0;
};

// Measures the offset by messages between rank 0 and each other rank, one after
// the other. Of several round trips the fastest counts: rank 0's answer was
// given at some time between question and answer, so the error is at most half
// of the round trip (F. Cristian, "Probabilistic clock synchronization",
// Distributed Computing 3, 1989).
//
// Collective; the errors are those of send() and recv(). Profilers see nothing
// of it.
ClockOffset measure_clock_offset(const ProcessGroupPtr& group);

// The objects that a trace has beside its events.

// Returns "distributedInfo" as JSON, as torch/profiler/profiler.py writes it
// for Python's trace tools: the default group's backend, rank and size, and all
// groups of this process. Empty if there is no default group.
std::string distributed_info();

// Returns all groups of this process as JSON, as an execution trace of Python's
// has them. Empty if there is no default group.
std::string process_group_config();

// Returns "lockstep" as JSON (profiler.h). `group` may be null;
// then rank and size are those that log_names.h names.
std::string lockstep_info(const ProcessGroupPtr& group,
                          const ClockOffset& clock);

}  // namespace lockstep::internal
