#pragma once

#include <string>

#include "lockstep/cli/report/scaling_result.h"

namespace lockstep::internal {

// Returns an HTML page that stands alone: the commands, the machine, and for
// each kind of scaling the table and a picture (SVG) of samples per second over
// the number of processes.
std::string scaling_page(const ScalingResult& result);

}  // namespace lockstep::internal
