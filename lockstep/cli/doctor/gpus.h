#pragma once

#include <optional>
#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/machine_roots.h"
#include "lockstep/cli/doctor/nvml.h"

namespace lockstep::internal {

// NVIDIA's GPUs of this host: whether their driver runs, which of them ranks
// will see, and, if there are several, whether they reach each other's memory.
// `nvml`: what ask_nvml() returned.
std::vector<Finding> check_gpus(const MachineRoots& roots,
                                const std::optional<NvmlAnswer>& nvml);

}  // namespace lockstep::internal
