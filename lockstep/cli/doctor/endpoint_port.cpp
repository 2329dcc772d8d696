#include "lockstep/cli/doctor/endpoint_port.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>

namespace lockstep::internal {
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
