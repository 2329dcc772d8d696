#include "lockstep/launch/nodes/store_connector.h"
#include "lockstep/base/deadline.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRetryInterval{100};
constexpr milliseconds kAcceptAllowance{1000};
// How long the store's client may try by itself; open() tries again.
constexpr milliseconds kOpenAllowance{3000};
// After this time the user is told what is being waited for.
constexpr milliseconds kLongConnect{5000};
// For how long a store that has another secret, or closes connections, may be
// that of a job that is ending.
constexpr milliseconds kRefusedAllowance{10'000};
// For how long the host of a store that existed may refuse connections.
constexpr milliseconds kGoneAllowance{3000};
constexpr int kBacklog = 1024;

// Returns where the store that this agent hosts can be reached.
std::string place_of_own(const SocketAddress& address, bool beyond_loopback) {
  if (!beyond_loopback) {
    return "this node hosts the agents' store on " + address.host();
  }
  const std::string text =
      "this node hosts the agents' store on every interface";
  const auto interface = interface_of(address);
  if (!interface || address.is_loopback()) return text;
  const std::string on = "; " + address.host() + " is on " + interface->name;
  if (!interface->leads_nowhere) return text + on;
  return text + on +
         ", to which no cable leads: if other hosts have this address, too, "
         "each of them hosts a store of its own; then name an address that one "
         "host alone has";
}

// Returns where the store of another agent is, and this host's way there.
std::string place_of_other(const SocketAddress& address) {
  const std::string text =
      "another node hosts the agents' store, at " + address.host() + "; ";
  try {
    const std::string own = local_address_towards(address);
    const auto interface = interface_of(resolve({own, 0}).front());
    return text + "this node's way there is from " + own +
           (interface ? " on " + interface->name : "");
  } catch (const std::exception& error) {
    return text + "this node has no way there: " + error.what();
  }
}

// Returns what is known of a store that no agent hosts yet.
std::string place_to_be(const std::vector<SocketAddress>& addresses,
                        bool port_in_use) {
  if (addresses.empty()) return "the name has no address yet";
  if (port_in_use) {
    return "this node would host it, but another process uses the port";
  }
  return place_of_other(addresses.front());
}

}  // namespace

std::string StoreConnector::Failure::text() const {
  return reason +
         (error == 0 ? "" : " (" + std::string(std::strerror(error)) + ")");
}

FileDescriptor StoreConnector::listen(
    const std::vector<SocketAddress>& addresses, bool& port_in_use) const {
  int error = EADDRNOTAVAIL;
  for (const SocketAddress& address : addresses) {
    // An agent that was told to host is believed, as a gateway may map the
    // address to this host.
    if (!options_.is_host && !is_of_this_host(address)) continue;
    FileDescriptor fd = bind_for_nodes(options_.endpoint, address);
    // With SO_REUSEADDR two agents can both bind, but only one can listen.
    if (fd && ::listen(fd.get(), kBacklog) == 0) return fd;
    error = errno;
    if (error == EADDRINUSE) break;
  }
  port_in_use = error == EADDRINUSE;
  if (options_.is_host == true) {
    throw std::invalid_argument(
        "the agents' store cannot be hosted at " + options_.endpoint.text() +
        ": " + std::strerror(error) +
        (error == EADDRINUSE ? "; another process listens there: if it is an "
                               "agent with the same --node-rank, give each its "
                               "own, else give another port to all nodes"
                             : "; give all nodes an address of this host"));
  }
  return {};
}

std::optional<OpenedStore> StoreConnector::host(
    const std::vector<SocketAddress>& addresses, const Deadline& deadline,
    bool& port_in_use) const {
  port_in_use = false;
  if (options_.is_host == false) return std::nullopt;
  FileDescriptor fd = listen(addresses, port_in_use);
  if (!fd) return std::nullopt;
  const SocketAddress bound = bound_address(fd.get());
  AgentStoreAddress address;
  // The store connects to itself, and cannot connect to a wildcard address. One
  // of IPv6 takes IPv4, too.
  address.host = bound.is_loopback() ? bound.host() : "127.0.0.1";
  address.port = static_cast<uint16_t>(bound.port());
  address.listen_fd = fd.release();
  address.timeout = deadline.remaining();
  address.secret = options_.secret;
  OpenedStore opened;
  opened.store = options_.open(address);
  opened.hosted = true;
  opened.beyond_loopback = !bound.is_loopback();
  const auto own = std::ranges::find_if(addresses, is_of_this_host);
  opened.hosting =
      place_of_own(own == addresses.end() ? addresses.front() : *own,
                   opened.beyond_loopback);
  return opened;
}

std::optional<OpenedStore> StoreConnector::connect(
    const std::vector<SocketAddress>& addresses, const Deadline& deadline,
    const std::function<bool()>& cancelled, Failure& failure) const {
  failure = {.refused = true};
  for (const SocketAddress& address : addresses) {
    if (cancelled()) break;
    // Tries a connection of our own first: the store's client would report on
    // stderr how often it has tried.
    if (!accepts_connections(address, kAcceptAllowance)) {
      failure.error = errno;
      failure.refused = failure.refused && failure.error == ECONNREFUSED;
      failure.reason =
          failure.refused ? "no process listens there" : "it cannot be reached";
      continue;
    }
    failure.refused = false;
    failure.error = 0;
    try {
      OpenedStore opened;
      opened.store = options_.open(
          {.host = address.host(),
           .port = static_cast<uint16_t>(address.port()),
           .timeout = std::clamp<milliseconds>(
               deadline.remaining(), kAcceptAllowance, kOpenAllowance),
           .secret = options_.secret,
           .rejoining = options_.rejoining});
      // On the host of the store a name, even its own, may mean loopback, where
      // no other node reaches this one.
      const std::string own = local_address_towards(address);
      if (!names_loopback(own)) opened.reachable_host = own;
      opened.hosting = place_of_other(address);
      return opened;
    } catch (const AgentStoreError& error) {
      failure.reason = error.what();  // the store may be ending
      failure.other_secret =
          dynamic_cast<const AgentStoreRefused*>(&error) != nullptr;
      failure.stranger =
          dynamic_cast<const AgentStoreStranger*>(&error) != nullptr;
    }
  }
  return std::nullopt;
}

OpenedStore StoreConnector::open(const std::function<bool()>& cancelled,
                                 const Notice& notice) const {
  const Deadline deadline = Deadline::after(options_.timeout);
  const std::string where = options_.endpoint.text();
  bool told = false;
  Deadline other_secret = Deadline::after(kRefusedAllowance);
  Deadline stranger = Deadline::after(kRefusedAllowance);
  Deadline refusal = Deadline::after(kGoneAllowance);
  while (true) {
    Failure failure;
    bool port_in_use = false;
    std::vector<SocketAddress> addresses;
    try {
      addresses = resolve(options_.endpoint);
      if (auto opened = host(addresses, deadline, port_in_use)) {
        return std::move(*opened);
      }
      if (auto opened = connect(addresses, deadline, cancelled, failure)) {
        return std::move(*opened);
      }
    } catch (const UnresolvedHost& error) {
      failure.reason = error.what();
    }
    const std::string& reason = failure.reason;
    if (cancelled()) throw AgentStoreError("cancelled");
    if (!failure.other_secret) {
      other_secret = Deadline::after(kRefusedAllowance);
    } else if (other_secret.expired()) {
      throw std::invalid_argument("the agents' store at " + where + ": " +
                                  reason +
                                  " than this one; give every node the same "
                                  "LOCKSTEP_JOB_SECRET or --rdzv-secret-file");
    }
    if (!port_in_use || !failure.stranger) {
      stranger = Deadline::after(kRefusedAllowance);
    } else if (stranger.expired()) {
      throw std::invalid_argument(
          "the agents' store cannot be hosted at " + where +
          ": another process uses the port: " + reason +
          "; if it is not an agent, give another port to all nodes");
    }
    if (!failure.refused) {
      refusal = Deadline::after(kGoneAllowance);
    } else if (port_in_use && refusal.expired()) {
      throw std::invalid_argument(
          "the agents' store cannot be hosted at " + where +
          ": another process uses the port, and accepts no connections there; "
          "give another port to all nodes");
    } else if (options_.was_there && refusal.expired()) {
      throw AgentStoreError("the agents' store at " + where +
                            " has ended: " + reason + " any more");
    }
    if (deadline.expired()) {
      throw AgentStoreError(
          "no agents' store was reached at " + where + " in " +
          seconds_text(options_.timeout) + ": " + failure.text() + "; " +
          place_to_be(addresses, port_in_use) +
          "; start the node that hosts it (with --master-addr node rank 0, "
          "with --rdzv-endpoint the one whose address this is), or name "
          "another endpoint");
    }
    if (!told && deadline.elapsed() > kLongConnect) {
      told = true;
      notice("waiting for the agents' store at " + where + ", for at most " +
             seconds_text(options_.timeout) + ": " + failure.text() + "; " +
             place_to_be(addresses, port_in_use));
    }
    std::this_thread::sleep_for(std::min(kRetryInterval, deadline.remaining()));
  }
}

}  // namespace lockstep::internal
