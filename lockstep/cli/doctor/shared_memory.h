#pragma once

#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

// Whether the system gives the anonymous memory in which the ranks of a host
// exchange tensors. Reserves 4 MiB of it for a moment.
Finding check_shared_memory();

}  // namespace lockstep::internal
