#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

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
