#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/machine_roots.h"

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

}  // namespace lockstep::internal
