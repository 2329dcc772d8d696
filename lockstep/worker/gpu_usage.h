#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/worker/nvml.h"

namespace lockstep::internal {

// The part of NVIDIA's GPUs that this process uses. Figures that the driver
// does not tell of each of its GPUs are nothing: no figure is of some of them
// only.
struct GpuUsage {
  int gpus = 0;                           // on which this process computes
  std::optional<int64_t> memory_bytes{};  // of this process, on all of them
  // These are of the GPUs, whatever other processes do on them: how much of the
  // last moment (up to a second) they computed, the mean; what they draw
  // together; and how hot the hottest is.
  std::optional<double> busy_percent{};
  std::optional<double> watts{};
  std::optional<int> celsius{};
};

// Returns nothing if this process computes on no GPU, as far as the driver
// tells, or if the driver cannot be asked. A process that has not loaded CUDA's
// driver does not ask it, so that it cannot be held up by one that hangs; one
// that has loaded it would wait for it in its own calls, too.
//
// Any thread. Returns nothing, too, while another thread asks. The first call
// loads NVML, which takes tens of milliseconds.
std::optional<GpuUsage> gpu_usage(const std::string& library = kNvmlLibrary);

}  // namespace lockstep::internal
