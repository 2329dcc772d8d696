#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Returns how many worker processes `--nproc-per-node` asks for. `text` is a
// number from 1 to 4096, or
//   "cpu"   the cores that this process may use (usable_cores()),
//   "gpu"   the GPUs that a worker will see (visible_gpus()),
//   "auto"  the GPUs if there are any, otherwise the cores.
// Throws std::invalid_argument that says what is allowed, also if "gpu" is
// given and there is none. Follows torchrun's determine_local_world_size.
int resolve_process_count(std::string_view text);

// Returns the number of cores in this process's affinity mask (which respects a
// container's cpuset), but at most the whole cores that its control groups
// grant (granted_cores()), and at least 1.
int usable_cores();

// Returns how many cores' worth of time the strictest of this process's control
// groups grants: cpu.max (version 2), or cpu.cfs_quota_us divided by
// cpu.cfs_period_us (version 1). Looks at the group that `membership` names and
// at those that contain it, below `root`. Returns nothing if there is no limit.
std::optional<double> granted_cores(
    const std::string& root = "/sys/fs/cgroup",
    const std::string& membership = "/proc/self/cgroup");

// Returns the number of NVIDIA devices in `device_directory` (nvidia0, nvidia1,
// ...), limited by CUDA_VISIBLE_DEVICES as CUDA does: unset means all, and the
// list ends at the first entry that names no device. Does not ask the driver:
// loading CUDA would cost the launcher 0.3 s and GPU memory.
int visible_gpus(const std::string& device_directory = "/dev");

namespace internal {

// Returns the visible ones of `devices` GPUs as CUDA_VISIBLE_DEVICES names
// them: numbers, or "GPU-" or "MIG-" and an identifier.
std::vector<std::string> visible_gpu_names(int devices);

// Returns the GPUs that the value `visible` of CUDA_VISIBLE_DEVICES names, up
// to the first item that is not a number, "GPU-..." or "MIG-...", where CUDA
// ends the list, too.
std::vector<std::string> named_gpus(std::string_view visible);

}  // namespace internal

}  // namespace lockstep
