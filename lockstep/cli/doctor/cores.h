#pragma once

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/machine_roots.h"

namespace lockstep::internal {

// Which of the host's cores this process may use, how much of their time its
// control groups grant, and how busy they are.
Finding check_cores(const MachineRoots& roots);

}  // namespace lockstep::internal
