#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep {

// What this process and its host use, as Linux tells it. What it does not tell
// is 0. There are no figures of GPUs.
struct SystemMetrics {
  std::chrono::steady_clock::time_point time{};
  // CPU time of this process since its start: all threads, in user and system
  // mode.
  double cpu_seconds{0};
  // Memory of this process that is in RAM, with shared memory that it has
  // touched (VmRSS of /proc/self/status).
  int64_t resident_bytes{0};
  // What all processes of the host, or container, use of /dev/shm, which is
  // where ranks share memory, and its size.
  int64_t shared_memory_bytes{0};
  int64_t shared_memory_size{0};
  // All network interfaces of the host, or container, except the loopback one,
  // since they came up.
  int64_t received_bytes{0};
  int64_t sent_bytes{0};
};

// Returns the present figures, from files of /proc. Any thread may call.
SystemMetrics system_metrics();

// Returns how much of the CPU this process has used between two moments: 100 is
// one core. 0 if no time has passed.
double cpu_percent(const SystemMetrics& earlier, const SystemMetrics& later);

}  // namespace lockstep
