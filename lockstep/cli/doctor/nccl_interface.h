#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/network_interfaces.h"

namespace lockstep::internal {

// Returns the names of the interfaces that NCCL uses for its sockets if
// NCCL_SOCKET_IFNAME is `wanted`: prefixes separated by commas, whole names
// after "=", what is to be left out after "^". Without it those that begin with
// "ib"; otherwise all but docker, lo and virbr; otherwise docker's; otherwise
// lo (NCCL User Guide, "Environment Variables").
std::vector<std::string> nccl_interfaces(
    const std::vector<NetworkInterface>& interfaces,
    const std::optional<std::string>& wanted);

// `gpus`: how many ranks will see; without any nothing needs NCCL.
Finding check_nccl(const std::vector<NetworkInterface>& interfaces,
                   const std::optional<std::string>& wanted, int gpus);

}  // namespace lockstep::internal
