#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace lockstep::internal {

// The time and memory that a process has used, by /proc/PID/stat.
struct ProcessUsage {
  int64_t cpu_ns = 0;  // of all its threads, in user and system mode
  int64_t resident_bytes = 0;
  char state = '?';  // "R", "S", "D", "T" (stopped), "Z"
};

// Returns nothing if there is no such process.
std::optional<ProcessUsage> usage_of(pid_t pid);

}  // namespace lockstep::internal
