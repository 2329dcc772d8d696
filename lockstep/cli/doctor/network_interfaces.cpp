#include "lockstep/cli/doctor/network_interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <memory>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/process/system_file.h"

namespace lockstep::internal {
namespace {

// Returns the address in numbers; empty if it is none of IPv4 or IPv6.
std::string numbers(const sockaddr* address) {
  if (address == nullptr) return {};
  const bool is_4 = address->sa_family == AF_INET;
  if (!is_4 && address->sa_family != AF_INET6) return {};
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(address, is_4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6),
                  text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return text.data();
}

std::string speed_text(int64_t mbits) {
  return mbits < 1000 ? std::to_string(mbits) + " Mb/s"
                      : std::to_string(mbits / 1000) + " Gb/s";
}

}  // namespace

std::vector<NetworkInterface> network_interfaces(const MachineRoots& roots) {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw_errno("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(
      first, &::freeifaddrs);
  std::vector<NetworkInterface> all;
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    auto known = std::ranges::find(all, at->ifa_name, &NetworkInterface::name);
    if (known == all.end()) {
      constexpr unsigned kUp = IFF_UP | IFF_RUNNING;
      const auto mbits =
          number_in(roots.sys / "class/net" / at->ifa_name / "speed");
      known = all.insert(known,
                         {.name = at->ifa_name,
                          .up = (at->ifa_flags & kUp) == kUp,
                          .loopback = (at->ifa_flags & IFF_LOOPBACK) != 0,
                          // A virtual interface may say -1.
                          .mbits = mbits && *mbits > 0 ? mbits : std::nullopt});
    }
    const std::string address = numbers(at->ifa_addr);
    if (!address.empty()) known->addresses.push_back(address);
  }
  return all;
}

std::string names_of(const std::vector<NetworkInterface>& interfaces) {
  std::string names;
  for (const auto& one : interfaces) {
    if (one.up) names += (names.empty() ? "" : ", ") + one.name;
  }
  return names.empty() ? "none" : names;
}

Finding check_nonlocal_bind(const MachineRoots& roots) {
  Finding finding{.name = "nonlocal bind"};
  std::string allowed;
  for (const char* family : {"ipv4", "ipv6"}) {
    const bool on =
        number_in(roots.proc / "sys/net" / family / "ip_nonlocal_bind") == 1;
    finding.values[family] = on;
    if (on) allowed += (allowed.empty() ? "" : " and ") + std::string(family);
  }
  if (allowed.empty()) {
    finding.found = "no program can take another host's address";
    return finding;
  }
  finding.found = "programs can take other hosts' addresses of " + allowed;
  finding.advice =
      "A wrong address of this host in MASTER_ADDR or --local-addr is noticed "
      "only when others do not reach it; lockstep run looks at the interfaces. "
      "If no program of this host needs it, as root: sysctl "
      "net.ipv4.ip_nonlocal_bind=0 net.ipv6.ip_nonlocal_bind=0.";
  return finding;
}

Finding check_interfaces(const std::vector<NetworkInterface>& interfaces) {
  Finding finding{.name = "network"};
  finding.values["interfaces"] = nlohmann::ordered_json::array();
  for (const auto& one : interfaces) {
    finding.values["interfaces"].push_back(
        {{"name", one.name},
         {"up", one.up},
         {"addresses", one.addresses},
         {"mbits", one.mbits ? nlohmann::ordered_json(*one.mbits) : nullptr}});
    if (!one.up || one.addresses.empty()) continue;
    finding.found += (finding.found.empty() ? "" : ", ") + one.name + " " +
                     one.addresses.front();
    if (one.mbits) finding.found += " (" + speed_text(*one.mbits) + ")";
  }
  if (finding.found.empty()) finding.found = "no interface is up";
  const bool has_loopback =
      std::ranges::any_of(interfaces, [](const NetworkInterface& one) {
        return one.loopback && one.up && !one.addresses.empty();
      });
  if (!has_loopback) {
    finding.fail(
        "The ranks of one host meet at the loopback interface, and it is not "
        "up: ip link set lo up (as root).");
  }
  return finding;
}

}  // namespace lockstep::internal
