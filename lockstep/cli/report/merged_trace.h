#pragma once

#include <string>

#include "lockstep/cli/report/trace_folder.h"

namespace lockstep::internal {

// Writes all events of the folder's traces into one trace at `path`, which
// Perfetto and chrome://tracing read: times are aligned and count from one
// base, each process has a pid of its own and is named after its rank, and ids
// of flows differ between files. The events of a rank stay in their order. The
// file appears when it is complete, and replaces an older one; of a symbolic
// link, that is its target. A pipe or a device is written as it is. Throws
// TraceFileError if it cannot be written, or if `path` is one of the traces.
void write_merged_trace(const TraceFolder& folder, const std::string& path);

}  // namespace lockstep::internal
