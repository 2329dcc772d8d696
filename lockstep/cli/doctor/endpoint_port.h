#pragma once

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/launch/endpoint.h"

namespace lockstep::internal {

// Whether a job can meet at `endpoint`: its name has an address, and, if that
// is one of this host, its port is free. `others`: other nodes meet there, and
// one on this host may listen there already.
Finding check_endpoint(const Endpoint& endpoint, bool others);

}  // namespace lockstep::internal
