#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "lockstep/observe/summary_writer.h"

namespace lockstep {

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
