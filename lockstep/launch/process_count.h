#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// How many worker processes `--nproc-per-node` asks for. `text` is a number
// from 1 to 4096, or
//   "cpu"   the cores that this process may use (usable_cores()),
//   "gpu"   the GPUs that a worker will see,
//   "auto"  the GPUs where there are any, else the cores.
// Throws std::invalid_argument that says what is allowed, also where "gpu" is
// asked for and there is none. After torchrun's determine_local_world_size.
int resolve_process_count(std::string_view text);

// Cores in this process's affinity mask (a container's cpuset counts), at most
// as many whole ones as its control groups grant it time for
// (granted_cores()); at least 1.
int usable_cores();

// The cores' worth of time that the strictest of this process's control groups
// grants: cpu.max (version 2), or cpu.cfs_quota_us by cpu.cfs_period_us
// (version 1), of the group that `membership` names and of those around it,
// below `root`. Nothing if there is no limit.
std::optional<double> granted_cores(
    const std::string& root = "/sys/fs/cgroup",
    const std::string& membership = "/proc/self/cgroup");

// NVIDIA devices in `device_directory` (nvidia0, nvidia1, ...), limited by
// CUDA_VISIBLE_DEVICES as CUDA does: unset means all, and the list ends at the
// first entry that names no device. Asks no driver: a launcher that loads CUDA
// would take 0.3 s and GPU memory.
int visible_gpus(const std::string& device_directory = "/dev");

}  // namespace lockstep
