#pragma once

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/machine_roots.h"

namespace lockstep::internal {

// The size of /dev/shm, and whether it can be written. Lockstep's own shared
// memory is elsewhere, but that of NCCL and of Python's DataLoader lies there.
Finding check_dev_shm(const MachineRoots& roots);

}  // namespace lockstep::internal
