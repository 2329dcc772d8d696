#pragma once

#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

// Whether temporary files can be written where TMPDIR says, and where else they
// go.
Finding check_temporary_files();

}  // namespace lockstep::internal
