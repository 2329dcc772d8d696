#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

inline constexpr const char* kNvmlLibrary = "libnvidia-ml.so.1";

// NVIDIA's management library (NVML), which comes with the driver and is loaded
// at run time, so that nothing of CUDA is needed to build. It sees the GPUs of
// the host that this process may use, whatever CUDA_VISIBLE_DEVICES is.
//
// A driver that is in trouble may never answer any of these calls. What a GPU
// or a version of the driver does not tell is nothing. Calls throw
// std::runtime_error with NVML's words if it fails. For one thread at a time.
class Nvml {
 public:
  using Device = struct OpaqueNvmlDevice*;

  // Returns null if there is no such library.
  static std::unique_ptr<Nvml> load(const std::string& library = kNvmlLibrary);
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml();

  std::string driver();           // "580.82.07"
  std::vector<Device> devices();  // that this process may use
  std::string name_of(Device device);
  std::optional<int64_t> memory_bytes(Device device);  // in all
  // Returns whether one GPU reads the other's memory; true, too, if the driver
  // does not tell, as for parts of a GPU.
  bool reads(Device from, Device to);

  // A process that computes on a GPU, by its number in the namespace of the
  // calling process: the driver leaves out those that have none there.
  struct Process {
    pid_t pid = 0;
    std::optional<int64_t> memory_bytes{};
  };
  std::vector<Process> processes(Device device);
  // How much of the last moment (up to a second) some process computed.
  std::optional<int> busy_percent(Device device);
  std::optional<double> watts(Device device);
  std::optional<int> celsius(Device device);

 private:
  struct Unloader {
    void operator()(void* library) const;
  };
  explicit Nvml(void* library);
  // Returns the function of this name; null if the library lacks it.
  template <typename Function>
  Function* find(const char* name) const;
  template <typename Function>
  Function* call(const char* name) const;
  template <typename Ask>
  std::string text(const Ask& ask) const;
  void check(int result) const;

  std::unique_ptr<void, Unloader> library_;
  bool started_ = false;
};

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
