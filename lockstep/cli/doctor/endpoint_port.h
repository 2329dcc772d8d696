#pragma once

#include "lockstep/base/endpoint.h"
#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

// Whether a job can meet at `endpoint`: its name has an address, and, if that
// is one of this host, its port is free. `others`: other nodes meet there, so
// that the one which listens there says whether it can.
Finding check_endpoint(const Endpoint& endpoint, bool others);

}  // namespace lockstep::internal
