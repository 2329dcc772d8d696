#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// How many worker processes `--nproc-per-node` asks for. `text` is a number
// from 1 to 4096, or
//   "cpu"   the cores that this process may run on (sched_getaffinity, so a
//           container's cpuset counts),
//   "gpu"   the GPUs that a worker will see,
//   "auto"  the GPUs where there are any, else the cores.
// Throws std::invalid_argument that says what is allowed, also where "gpu" is
// asked for and there is none. After torchrun's determine_local_world_size.
int resolve_process_count(std::string_view text);

// Cores in this process's affinity mask; at least 1.
int usable_cores();

// NVIDIA devices in `device_directory` (nvidia0, nvidia1, ...), limited by
// CUDA_VISIBLE_DEVICES as CUDA does: unset means all, and the list ends at the
// first entry that names no device. Asks no driver: a launcher that loads CUDA
// would take 0.3 s and GPU memory.
int visible_gpus(const std::string& device_directory = "/dev");

}  // namespace lockstep
