#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace lockstep {

// The resources that this process and its host use, as Linux tells it. A figure
// that it does not tell is 0.
struct SystemMetrics {
  std::chrono::steady_clock::time_point time{};
  // CPU time of this process since its start: all threads, in user and system
  // mode.
  double cpu_seconds{0};
  // Memory of this process that is in RAM, with shared memory that it has
  // touched (VmRSS of /proc/self/status).
  int64_t resident_bytes{0};
  // The part of /dev/shm that all processes of the host, or container, use,
  // which is where ranks share memory, and its size.
  int64_t shared_memory_bytes{0};
  int64_t shared_memory_size{0};
  // All network interfaces of the host, or container, except the loopback one,
  // since they came up.
  int64_t received_bytes{0};
  int64_t sent_bytes{0};
  // NVIDIA's GPUs on which this process computes, by their management library
  // (NVML). Nothing if there are none, or the driver does not tell. Memory is
  // that of this process, on all of them. The others are of the GPUs, whatever
  // other processes do there: how much of the last moment (up to a second) they
  // computed, the mean, where 100 is all of it; what they draw together; and
  // how hot the hottest is.
  std::optional<int64_t> gpu_memory_bytes{};
  std::optional<double> gpu_percent{};
  std::optional<double> gpu_watts{};
  std::optional<double> gpu_celsius{};
};

// Returns the present figures, from files of /proc, and from NVML if this
// process has loaded CUDA. The first call then takes tens of milliseconds. Any
// thread may call.
SystemMetrics system_metrics();

// Returns how much of the CPU this process has used between two moments: 100 is
// one core. 0 if no time has passed.
double cpu_percent(const SystemMetrics& earlier, const SystemMetrics& later);

}  // namespace lockstep
