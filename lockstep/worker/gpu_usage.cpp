#include "lockstep/worker/gpu_usage.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <mutex>

namespace lockstep::internal {
namespace {

bool has_loaded_cuda() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return false;
  dlclose(driver);
  return true;
}

// Adds a figure of one more GPU; once one is missing, the sum is missing.
template <typename Sum, typename Value>
void add(std::optional<Sum>& sum, const std::optional<Value>& value) {
  if (sum && value) {
    *sum += static_cast<Sum>(*value);
  } else {
    sum.reset();
  }
}

std::optional<GpuUsage> usage_by(Nvml& nvml) {
  GpuUsage usage{
      .memory_bytes = 0, .busy_percent = 0.0, .watts = 0.0, .celsius = 0};
  const pid_t own = getpid();
  for (const auto device : nvml.devices()) {
    bool uses = false;
    for (const auto& process : nvml.processes(device)) {
      if (process.pid != own) continue;
      // A part of a GPU (MIG) is an entry of its own.
      uses = true;
      add(usage.memory_bytes, process.memory_bytes);
    }
    if (!uses) continue;
    ++usage.gpus;
    add(usage.busy_percent, nvml.busy_percent(device));
    add(usage.watts, nvml.watts(device));
    const auto celsius = nvml.celsius(device);
    if (usage.celsius && celsius) {
      usage.celsius = std::max(*usage.celsius, *celsius);
    } else {
      usage.celsius.reset();
    }
  }
  if (usage.gpus == 0) return std::nullopt;
  if (usage.busy_percent) *usage.busy_percent /= usage.gpus;
  return usage;
}

}  // namespace

std::optional<GpuUsage> gpu_usage(const std::string& library) {
  if (!has_loaded_cuda()) return std::nullopt;
  // NVML is loaded once for the process, and stays, as a module.
  static std::mutex mutex;
  static std::unique_ptr<Nvml> nvml;
  static pid_t loaded_in = 0;  // a child must start it anew
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock) return std::nullopt;
  try {
    if (loaded_in != getpid()) {
      loaded_in = getpid();
      static_cast<void>(nvml.release());
      nvml = Nvml::load(library);
    }
    return nvml ? usage_by(*nvml) : std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;  // the driver has other trouble than a rank's figures
  }
}

}  // namespace lockstep::internal
