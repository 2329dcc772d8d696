#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/worker/nvml.h"

namespace lockstep::internal {

// The GPUs of this host, as NVML (worker/nvml.h) describes them.
struct NvmlAnswer {
  struct Gpu {
    std::string name;
    int64_t memory_bytes = 0;  // 0 if it is not known
  };
  std::string error{};   // not empty: why it says nothing more
  std::string driver{};  // "580.82.07"
  std::vector<Gpu> gpus{};
  // The pairs of GPUs, by their places in `gpus`, of which one cannot read the
  // other's memory.
  std::vector<std::pair<int, int>> apart{};
};

// Asks the library in a process of its own, for `allowed` at most: a driver
// that is in trouble may never answer. That is then the `error`. Returns
// nothing if there is no such library. This process must have one thread. If no
// process can be started, the `error` says why.
std::optional<NvmlAnswer> ask_nvml(
    const std::string& library = kNvmlLibrary,
    std::chrono::milliseconds allowed = std::chrono::seconds(20));

// NVIDIA's GPUs of this host: whether their driver runs, which of them ranks
// will see, and, if there are several, whether they reach each other's memory.
// `nvml`: what ask_nvml() returned.
std::vector<Finding> check_gpus(const MachineRoots& roots,
                                const std::optional<NvmlAnswer>& nvml);

}  // namespace lockstep::internal
