#pragma once

namespace lockstep {

// Returns the number of cores in this process's affinity mask (which respects a
// container's cpuset), but at most the whole cores that its control groups
// grant, and at least 1.
int usable_cores();

}  // namespace lockstep
