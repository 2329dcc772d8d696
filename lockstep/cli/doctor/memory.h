#pragma once

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/machine_roots.h"

namespace lockstep::internal {

// How much memory processes can still get, of the host and of the control
// groups of this process.
Finding check_memory(const MachineRoots& roots);

}  // namespace lockstep::internal
