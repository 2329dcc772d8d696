#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/observe/summary_writer.h"

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

struct SystemMetricsSamplerOptions {
  // The time between two samples; 1 ms or more.
  std::chrono::milliseconds interval{std::chrono::seconds(10)};
  // The group of the tags in TensorBoard.
  std::string prefix{"system"};
};

// Writes what this rank uses (system_metrics.h) into a SummaryWriter, from time
// to time, in a thread of its own: the scalars system/cpu_percent,
// system/resident_bytes, system/shared_memory_bytes, system/received_bytes and
// system/sent_bytes; and if the rank computes on GPUs system/gpu_percent,
// system/gpu_memory_bytes, system/gpu_watts and system/gpu_celsius. The step is
// the number of seconds since the sampler was made.
//
// It does nothing on a rank on which the writer does not write: to see all
// ranks use SummaryWriterOptions::every_rank. The writer must live longer than
// the sampler; if it is closed, the sampler ends. In a child process that was
// forked later nothing is sampled.
class SystemMetricsSampler {
 public:
  // Throws std::invalid_argument if an option is out of range.
  explicit SystemMetricsSampler(SummaryWriter& writer,
                                SystemMetricsSamplerOptions options = {});
  // Ends the thread at once.
  ~SystemMetricsSampler();
  SystemMetricsSampler(const SystemMetricsSampler&) = delete;
  SystemMetricsSampler& operator=(const SystemMetricsSampler&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;  // null if there is nothing to do
};

}  // namespace lockstep
