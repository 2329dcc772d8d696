#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/cli/report/trace_events.h"
#include "lockstep/cli/report/trace_scan.h"

namespace lockstep::internal {

struct TraceActivity {
  Interval time{};
  Activity activity = Activity::none;
  double flops = 0;
  uint32_t name = 0;  // an index of TraceFile::names
};

// A thread of the host, or a stream of a GPU.
struct TraceThread {
  bool on_device = false;
  // Those that the report counts, in the order of their begins; if two begin
  // together, the longer one is first.
  std::vector<TraceActivity> activities{};
};

// A process as the trace has them; each GPU is one, too.
struct TraceProcess {
  std::string id{};      // "pid" as it stands in the file
  std::string name{};    // empty if it is not known
  std::string labels{};  // "CPU", "GPU 0", or empty
  size_t activities = 0;
};

// The part of one file that the report needs: the trace of one rank, of one
// cycle of its profiler's schedule. Times are nanoseconds since 1970 by the
// clock to which the file's offset leads, or by the host's own clock if there
// is no offset.
struct TraceFile {
  std::string path{};
  TraceHeader header{};
  size_t events = 0;  // those that have a time
  Interval time{};    // of all events
  std::vector<TraceThread> threads{};
  std::vector<TraceProcess> processes{};  // in the order of the file
  std::map<int64_t, Interval> steps{};    // by their number; apart in time
  std::vector<std::string> names{};       // of activities, each once
  size_t uncounted_convolutions = 0;      // whose operations it does not tell

  bool has_device() const;
  // Returns the process of the rank itself, an index of `processes`.
  size_t own_process() const;
};

// Throws TraceFileError, also for steps of one number or that overlap.
TraceFile read_trace_file(const std::string& path);

}  // namespace lockstep::internal
