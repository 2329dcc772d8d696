#pragma once

#include <chrono>
#include <optional>

#include "lockstep/comm/collective_options.h"

namespace lockstep {

// Blocks until every rank of the group has called it. With async_op, returns at
// once, and Work::wait() blocks.
WorkPtr barrier(const CollectiveOptions& options = {});

// Group and timeout as in CollectiveOptions.
struct MonitoredBarrierOptions {
  ProcessGroupPtr group{};
  std::optional<std::chrono::milliseconds> timeout{};
};

// A barrier that names the ranks that are missing: at the timeout every rank
// that has come throws c10::DistBackendError with the ranks that have not.
// (Python's names one of them, or all of them on rank 0 with wait_all_ranks.)
// Always blocks.
//
// It uses the group's store, not its backend: it takes some 0.3 ms a rank, and
// works with any backend, even while the backend hangs. All ranks must be
// Lockstep's: Python's monitored_barrier uses another protocol.
void monitored_barrier(const MonitoredBarrierOptions& options = {});

}  // namespace lockstep
