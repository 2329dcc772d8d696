#pragma once

#include <string_view>

namespace lockstep {

// Returns how many worker processes `--nproc-per-node` asks for. `text` is a
// number from 1 to 4096, or
//   "cpu"   the cores that this process may use (usable_cores()),
//   "gpu"   the GPUs that a worker will see (visible_gpus()),
//   "auto"  the GPUs if there are any, otherwise the cores.
// Throws std::invalid_argument that says what is allowed, also if "gpu" is
// given and there is none. Follows torchrun's determine_local_world_size.
int resolve_process_count(std::string_view text);

}  // namespace lockstep
