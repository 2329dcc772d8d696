#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/network_interfaces.h"
#include "lockstep/worker/own_address.h"

namespace lockstep::internal {

// The interfaces that the backend "gloo" will use. `on_one_host` and
// `between_hosts` are what own_address() returns for the two; `master` is
// MASTER_ADDR.
Finding check_gloo(const std::vector<NetworkInterface>& interfaces,
                   const OwnAddress& on_one_host,
                   const OwnAddress& between_hosts,
                   const std::optional<std::string>& master);

}  // namespace lockstep::internal
