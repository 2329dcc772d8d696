#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/endpoint.h"
#include "lockstep/cli/doctor/finding.h"
#include "lockstep/worker/own_address.h"

namespace lockstep::internal {

// A network interface of this host, or of the container.
struct NetworkInterface {
  std::string name;
  bool up = false;  // and connected
  bool loopback = false;
  std::vector<std::string> addresses{};  // of IPv4 and IPv6, in numbers
  std::optional<int64_t> mbits{};        // Mb/s, if the driver tells it
};

// Returns the interfaces in the system's order. Throws std::system_error.
std::vector<NetworkInterface> network_interfaces(const MachineRoots& roots);

// Returns "eth0, lo", those that are up; "none" if none is.
std::string names_of(const std::vector<NetworkInterface>& interfaces);

// The interfaces that are up, and whether loopback, at which the ranks of one
// host meet, is among them.
Finding check_interfaces(const std::vector<NetworkInterface>& interfaces);

// Whether programs may bind addresses that are on no interface.
Finding check_nonlocal_bind(const MachineRoots& roots);

// The interfaces that the backend "gloo" will use. `on_one_host` and
// `between_hosts` are what own_address() returns for the two; `master` is
// MASTER_ADDR.
Finding check_gloo(const std::vector<NetworkInterface>& interfaces,
                   const OwnAddress& on_one_host,
                   const OwnAddress& between_hosts,
                   const std::optional<std::string>& master);

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

// Whether a job can meet at `endpoint`: its name has an address, and, if that
// is one of this host, its port is free. `others`: other nodes meet there, so
// that the one which listens there says whether it can.
Finding check_endpoint(const Endpoint& endpoint, bool others);

}  // namespace lockstep::internal
