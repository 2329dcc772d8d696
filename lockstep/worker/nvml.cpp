#include "lockstep/worker/nvml.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <mutex>
#include <stdexcept>

namespace lockstep::internal {
namespace {

// The part of NVML's interface that is used here (NVML API Reference Manual;
// its names, and numbers that never change). Its header comes with CUDA.
constexpr int kSuccess = 0;
constexpr int kNoPermission = 4;    // NVML_ERROR_NO_PERMISSION
constexpr int kTooSmall = 7;        // NVML_ERROR_INSUFFICIENT_SIZE
constexpr int kPeerReads = 0;       // NVML_P2P_CAPS_INDEX_READ
constexpr int kPeerStatusGood = 0;  // NVML_P2P_STATUS_OK
constexpr int kOnTheChip = 0;       // NVML_TEMPERATURE_GPU
constexpr auto kNotAvailable = std::numeric_limits<unsigned long long>::max();
// More processes than any GPU has contexts for.
constexpr unsigned kMostProcesses = 4096;

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct Utilization {
  unsigned gpu;
  unsigned memory;
};

// nvmlProcessInfo_v2_t, which nvmlDeviceGetComputeRunningProcesses_v3 takes.
struct ProcessInfo {
  unsigned pid;
  unsigned long long used_memory;
  unsigned gpu_instance;
  unsigned compute_instance;
};

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

void Nvml::Unloader::operator()(void* library) const { dlclose(library); }

std::unique_ptr<Nvml> Nvml::load(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  return std::unique_ptr<Nvml>(new Nvml(handle));
}

Nvml::Nvml(void* library) : library_(library) {
  check(call<int()>("nvmlInit_v2")());
  started_ = true;
}

Nvml::~Nvml() {
  if (!started_) return;
  if (auto* shutdown = find<int()>("nvmlShutdown")) shutdown();
}

template <typename Function>
Function* Nvml::find(const char* name) const {
  return reinterpret_cast<Function*>(dlsym(library_.get(), name));
}

template <typename Function>
Function* Nvml::call(const char* name) const {
  auto* const found = find<Function>(name);
  if (found == nullptr) {
    throw std::runtime_error(std::string("NVML lacks ") + name);
  }
  return found;
}

template <typename Ask>
std::string Nvml::text(const Ask& ask) const {
  std::array<char, 96> bytes{};  // NVML_DEVICE_NAME_V2_BUFFER_SIZE
  check(ask(bytes.data(), static_cast<unsigned>(bytes.size())));
  return bytes.data();
}

void Nvml::check(int result) const {
  if (result == kSuccess) return;
  throw std::runtime_error(call<const char*(int)>("nvmlErrorString")(result));
}

std::string Nvml::driver() {
  return text([this](char* to, unsigned size) {
    return call<int(char*, unsigned)>("nvmlSystemGetDriverVersion")(to, size);
  });
}

std::vector<Nvml::Device> Nvml::devices() {
  unsigned count = 0;
  check(call<int(unsigned*)>("nvmlDeviceGetCount_v2")(&count));
  std::vector<Device> usable;
  for (unsigned i = 0; i < count; ++i) {
    Device device = nullptr;
    const int result = call<int(unsigned, Device*)>(
        "nvmlDeviceGetHandleByIndex_v2")(i, &device);
    if (result == kNoPermission) continue;
    check(result);
    usable.push_back(device);
  }
  return usable;
}

std::string Nvml::name_of(Device device) {
  return text([&](char* to, unsigned size) {
    return call<int(Device, char*, unsigned)>("nvmlDeviceGetName")(device, to,
                                                                   size);
  });
}

std::optional<int64_t> Nvml::memory_bytes(Device device) {
  // A GPU that shares the host's memory does not tell this.
  Memory memory{};
  if (call<int(Device, Memory*)>("nvmlDeviceGetMemoryInfo")(device, &memory) !=
      kSuccess) {
    return std::nullopt;
  }
  return static_cast<int64_t>(memory.total);
}

bool Nvml::reads(Device from, Device to) {
  int status = kPeerStatusGood;
  call<int(Device, Device, int, int*)>("nvmlDeviceGetP2PStatus")(
      from, to, kPeerReads, &status);
  return status == kPeerStatusGood;
}

std::vector<Nvml::Process> Nvml::processes(Device device) {
  auto* const ask = find<int(Device, unsigned*, ProcessInfo*)>(
      "nvmlDeviceGetComputeRunningProcesses_v3");
  if (ask == nullptr) return {};  // a driver from before 2021
  std::vector<ProcessInfo> found(64);
  while (true) {
    auto count = static_cast<unsigned>(found.size());
    const int result = ask(device, &count, found.data());
    if (result == kTooSmall && found.size() < kMostProcesses) {
      found.resize(2 * found.size());
      continue;
    }
    if (result != kSuccess || count > found.size()) return {};
    found.resize(count);
    break;
  }
  std::vector<Process> all;
  for (const auto& info : found) {
    Process process{.pid = static_cast<pid_t>(info.pid)};
    if (info.used_memory != kNotAvailable) {
      process.memory_bytes = static_cast<int64_t>(info.used_memory);
    }
    all.push_back(process);
  }
  return all;
}

std::optional<int> Nvml::busy_percent(Device device) {
  Utilization utilization{};
  auto* const ask =
      find<int(Device, Utilization*)>("nvmlDeviceGetUtilizationRates");
  if (ask == nullptr || ask(device, &utilization) != kSuccess ||
      utilization.gpu > 100) {
    return std::nullopt;
  }
  return static_cast<int>(utilization.gpu);
}

std::optional<double> Nvml::watts(Device device) {
  unsigned milliwatts = 0;
  auto* const ask = find<int(Device, unsigned*)>("nvmlDeviceGetPowerUsage");
  if (ask == nullptr || ask(device, &milliwatts) != kSuccess) {
    return std::nullopt;
  }
  return milliwatts / 1000.0;
}

std::optional<int> Nvml::celsius(Device device) {
  unsigned degrees = 0;
  auto* const ask =
      find<int(Device, int, unsigned*)>("nvmlDeviceGetTemperature");
  if (ask == nullptr || ask(device, kOnTheChip, &degrees) != kSuccess) {
    return std::nullopt;
  }
  return static_cast<int>(degrees);
}

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
