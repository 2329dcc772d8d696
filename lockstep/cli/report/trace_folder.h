#pragma once

#include <string>
#include <vector>

#include "lockstep/cli/report/trace_file.h"

namespace lockstep::internal {

// The traces of one training run.
struct TraceFolder {
  std::string path{};
  int world_size = 1;
  std::vector<TraceFile> files{};  // sorted by rank, then by time
  std::vector<int> ranks{};        // those that have a trace, sorted
  std::vector<int> missing{};      // the other ranks of the world, sorted
  // Findings that are odd, but do not hinder a report; one sentence each.
  std::vector<std::string> warnings{};
};

// Reads the traces of the folder itself: the files named *.trace.json or
// *.trace.json.gz, or if there are none, *.json and *.json.gz. Merged traces
// are left out. A file without steps becomes one step, and files without events
// are left out, each with a warning. Throws TraceFileError if there is no trace
// with events, if the files are of different worlds, or if two files are of one
// rank and the same time or step.
TraceFolder read_trace_folder(const std::string& path);

// Writes all events of the folder's traces into one trace at `path`, which
// Perfetto and chrome://tracing read: times are aligned and count from one
// base, each process has a pid of its own and is named after its rank, and ids
// of flows differ between files. The events of a rank stay in their order. The
// file appears when it is complete, and replaces an older one; of a symbolic
// link, that is its target. A pipe or a device is written as it is. Throws
// TraceFileError if it cannot be written, or if `path` is one of the traces.
void write_merged_trace(const TraceFolder& folder, const std::string& path);

}  // namespace lockstep::internal
