#pragma once

#include "lockstep/comm/collective_options.h"

namespace lockstep {

// Returns when every rank of the group has called it.
WorkPtr barrier(const CollectiveOptions& options = {});

struct MonitoredBarrierOptions {
  ProcessGroupPtr group{};               // none: the default group
  std::chrono::milliseconds timeout{0};  // zero: the group's
};

// A barrier that knows who is missing: at the time-out every rank that is
// there throws c10::DistBackendError with the ranks that are not (Python's
// names one, or all on rank 0 with wait_all_ranks). Always blocks.
//
// Goes over the group's store, not its backend: some 0.3 ms a rank, any
// backend, and it works where the backend hangs. All ranks must be Lockstep's:
// Python's goes another way.
void monitored_barrier(const MonitoredBarrierOptions& options = {});

}  // namespace lockstep
