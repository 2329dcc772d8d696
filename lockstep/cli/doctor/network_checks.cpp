#include "lockstep/cli/doctor/network_checks.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <sstream>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/system_file.h"

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

namespace {

// Returns the interfaces that one pattern of NCCL_SOCKET_IFNAME selects.
std::vector<std::string> selected(
    const std::vector<NetworkInterface>& interfaces, std::string pattern) {
  const bool leave_out = pattern.starts_with('^');
  if (leave_out) pattern.erase(0, 1);
  const bool whole = pattern.starts_with('=');
  if (whole) pattern.erase(0, 1);
  std::vector<std::string> words;
  std::istringstream list(pattern);
  for (std::string word; std::getline(list, word, ',');) words.push_back(word);
  std::vector<std::string> names;
  for (const auto& one : interfaces) {
    if (!one.up || one.addresses.empty()) continue;
    const bool named = std::ranges::any_of(words, [&](const auto& word) {
      return whole ? one.name == word : one.name.starts_with(word);
    });
    if (named != leave_out) names.push_back(one.name);
  }
  return names;
}

}  // namespace

std::vector<std::string> nccl_interfaces(
    const std::vector<NetworkInterface>& interfaces,
    const std::optional<std::string>& wanted) {
  if (wanted) return selected(interfaces, *wanted);
  for (const char* pattern : {"ib", "^docker,lo,virbr", "docker", "lo"}) {
    auto names = selected(interfaces, pattern);
    if (!names.empty()) return names;
  }
  return {};
}

Finding check_nccl(const std::vector<NetworkInterface>& interfaces,
                   const std::optional<std::string>& wanted, int gpus) {
  Finding finding{.name = "NCCL"};
  const auto names = nccl_interfaces(interfaces, wanted);
  finding.values = {{"interfaces", names}};
  for (const auto& name : names) {
    finding.found += (finding.found.empty() ? "" : ", ") + name;
  }
  if (finding.found.empty()) finding.found = "no interface";
  finding.found += " for its sockets";
  if (wanted) finding.found += ", by NCCL_SOCKET_IFNAME=" + *wanted;
  if (names.empty()) {
    finding.advise(gpus > 0 ? Health::fail : Health::warn,
                   "Groups of GPUs cannot begin. Correct or unset "
                   "NCCL_SOCKET_IFNAME; the interfaces that are up: " +
                       names_of(interfaces) + ".");
  }
  return finding;
}

namespace {

constexpr std::chrono::milliseconds kConnectTime{1000};

// Returns why no process can listen at the endpoint; 0 if one can.
int error_of_listening(const Endpoint& endpoint, const SocketAddress& own) {
  const FileDescriptor fd = bind_for_nodes(endpoint, own);
  return fd && ::listen(fd.get(), 1) == 0 ? 0 : errno;
}

}  // namespace

Finding check_endpoint(const Endpoint& endpoint, bool others) {
  const std::string where = endpoint.text();
  Finding finding{.name = "endpoint"};
  finding.values = {{"endpoint", where}, {"interface", nullptr}};
  std::vector<SocketAddress> addresses;
  try {
    addresses = resolve(endpoint);
  } catch (const UnresolvedHost& error) {
    finding.found = error.what();
    finding.warn(
        "lockstep run waits until the name has an address. Correct "
        "it, or look at the name server.");
    return finding;
  }
  const auto own = std::ranges::find_if(addresses, is_of_this_host);
  if (own == addresses.end()) {
    finding.found = where + " is on another host";
    return finding;
  }
  const auto interface = interface_of(*own);
  const std::string on = interface ? interface->name : "lo";
  finding.values["interface"] = on;
  // To listen for a moment would take the port from a node that begins to.
  const int error = others ? 0 : error_of_listening(endpoint, *own);
  if (error == 0) {
    finding.found = (others ? where + " is an address of this host, on "
                            : "the port of " + where + " is free, on ") +
                    on;
    if (!own->is_loopback() && interface && interface->leads_nowhere) {
      finding.warn("No cable leads to " + on +
                   ", so other hosts may have its "
                   "addresses, too, and each would host a store of its own. "
                   "Name an address that one host alone has.");
    }
    return finding;
  }
  const bool listens =
      error == EADDRINUSE && accepts_connections(*own, kConnectTime);
  finding.found =
      listens ? "a process listens at " + where
              : "nothing can listen at " + where + ": " + std::strerror(error);
  // One that accepts connections may be that of a job that runs.
  finding.advise(listens ? Health::warn : Health::fail,
                 error == EADDRINUSE
                     ? "Another process uses the port: ss -anp 'sport = :" +
                           std::to_string(endpoint.port) +
                           "' names it. End it, or give all nodes another port."
                     : "Give all nodes another port or address.");
  return finding;
}

}  // namespace lockstep::internal
