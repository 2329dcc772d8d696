#include "lockstep/cli/doctor/gloo_interface.h"

#include <algorithm>

namespace lockstep::internal {
namespace {

// Returns the name of the interface with this address; empty if there is none.
std::string holder_of(const std::string& address,
                      const std::vector<NetworkInterface>& interfaces) {
  for (const auto& one : interfaces) {
    if (std::ranges::find(one.addresses, address) != one.addresses.end()) {
      return one.name;
    }
  }
  return {};
}

// Describes what the user has named.
void check_named(const std::string& name,
                 const std::vector<NetworkInterface>& interfaces,
                 Finding& finding) {
  finding.found = name + ", named by GLOO_SOCKET_IFNAME";
  finding.values = {{"one_host", name}, {"several_hosts", name}};
  const std::string what =
      " Correct GLOO_SOCKET_IFNAME, which takes one name, or unset it; the "
      "interfaces that are up: " +
      names_of(interfaces) + ".";
  const auto named =
      std::ranges::find(interfaces, name, &NetworkInterface::name);
  if (named == interfaces.end()) {
    finding.fail("There is no interface of that name, so groups cannot begin." +
                 what);
  } else if (!named->up || named->addresses.empty()) {
    finding.fail("That interface is not up or has no address." + what);
  }
}

}  // namespace

Finding check_gloo(const std::vector<NetworkInterface>& interfaces,
                   const OwnAddress& on_one_host,
                   const OwnAddress& between_hosts,
                   const std::optional<std::string>& master) {
  Finding finding{.name = "Gloo"};
  if (!between_hosts.interface.empty()) {
    check_named(between_hosts.interface, interfaces, finding);
    return finding;
  }
  const std::string inside = holder_of(on_one_host.address, interfaces);
  const std::string between = holder_of(between_hosts.address, interfaces);
  finding.values = {{"one_host", nullptr}, {"several_hosts", nullptr}};
  if (!inside.empty()) finding.values["one_host"] = inside;
  finding.found = (inside.empty() ? "no interface" : inside) +
                  " on one host; between hosts ";
  if (!between.empty()) {
    finding.values["several_hosts"] = between;
    finding.found +=
        between + " (" + between_hosts.address + "), towards MASTER_ADDR";
  } else if (!master) {
    finding.found += "the interface towards MASTER_ADDR, which is not set";
  } else if (is_loopback(*master)) {
    finding.found += "none, as MASTER_ADDR is " + *master;
  } else {
    finding.found += "none is known";
    finding.warn("MASTER_ADDR is \"" + *master +
                 "\", which is this host itself, cannot be looked up or has no "
                 "route. Correct it, or name the interface with "
                 "GLOO_SOCKET_IFNAME.");
  }
  return finding;
}

}  // namespace lockstep::internal
