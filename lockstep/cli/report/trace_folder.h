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

}  // namespace lockstep::internal
