#pragma once

#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/machine_roots.h"

namespace lockstep::internal {

// The limits that this process has and its children inherit (setrlimit(2)):
// open files, processes, file size, locked memory, core files. The number of
// processes is also limited by control groups.
std::vector<Finding> check_limits(const MachineRoots& roots);

}  // namespace lockstep::internal
