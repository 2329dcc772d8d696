#pragma once

#include <string>

#include "lockstep/comm/process_group.h"
#include "lockstep/observe/clock_offset.h"

// The objects that a trace has beside its events.
namespace lockstep::internal {

// Returns "distributedInfo" as JSON, as torch/profiler/profiler.py writes it
// for Python's trace tools: the default group's backend, rank and size, and all
// groups of this process. Empty if there is no default group.
std::string distributed_info();

// Returns all groups of this process as JSON, as an execution trace of Python's
// has them. Empty if there is no default group.
std::string process_group_config();

// Returns "lockstep" as JSON (profiler.h). `group` may be null;
// then rank and size are those that log_rank.h names.
std::string lockstep_info(const ProcessGroupPtr& group,
                          const ClockOffset& clock);

}  // namespace lockstep::internal
