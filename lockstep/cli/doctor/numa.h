#pragma once

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/machine_roots.h"

namespace lockstep::internal {

// The nodes of a host whose cores reach a part of its memory faster than the
// rest, and which of them this process may use.
Finding check_numa(const MachineRoots& roots);

}  // namespace lockstep::internal
