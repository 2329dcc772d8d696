#pragma once

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/machine_roots.h"

namespace lockstep::internal {

// Whether the kernel gives pages of 2 MiB to the memory of a process, and to
// memory that processes share.
Finding check_huge_pages(const MachineRoots& roots);

}  // namespace lockstep::internal
