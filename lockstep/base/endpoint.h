#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// A host and a TCP port, as the options name them.
struct Endpoint {
  std::string host{};  // a name or a numeric address, without brackets
  int port = 0;

  std::string text() const;  // "HOST:PORT", an IPv6 address in brackets
};

// Parses "HOST", "HOST:PORT", "[V6]", "[V6]:PORT" or a bare IPv6 address.
// Throws std::invalid_argument that begins with `option`.
Endpoint parse_endpoint(std::string_view option, const std::string& text,
                        int default_port);

// One address to which an endpoint resolves.
class SocketAddress {
 public:
  SocketAddress(const sockaddr* address, socklen_t length);

  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&storage_);
  }
  socklen_t length() const { return length_; }
  int family() const { return storage_.ss_family; }
  bool is_loopback() const;
  std::string host() const;  // numeric, without brackets
  int port() const;
  // Returns the address that means every interface, of the same family and
  // port.
  SocketAddress wildcard() const;

 private:
  sockaddr_storage storage_{};
  socklen_t length_;
};

// Thrown if a name resolves to no address, at least at the moment.
class UnresolvedHost : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Looks up a host with the system's resolver and its timeouts; a numeric
// address needs no look-up. The result is not empty. Throws UnresolvedHost with
// the host and the reason.
std::vector<SocketAddress> resolve(const Endpoint& endpoint);

// Returns true for "localhost" and for a numeric address of the loopback
// interface. Returns false for a host's own name, although Debian maps it to
// 127.0.1.1: other hosts reach it at another address.
bool names_loopback(const std::string& host);
bool is_numeric(const std::string& host);

// Returns true for 0.0.0.0 and ::, which a server may bind but nothing can
// reach.
bool names_every_interface(const std::string& host);

// Returns a bound socket, close-on-exec, with SO_REUSEADDR. A socket that is
// bound to every IPv6 address takes IPv4 too. Returns an empty descriptor if
// the system refuses; errno says why.
FileDescriptor bind_socket(const SocketAddress& address);
// Returns the address that a socket is bound to. Throws std::system_error.
SocketAddress bound_address(int fd);

// Returns whether `address` is one of an interface of this host that is up, or
// of loopback. (Whether it can be bound says nothing: with ip_nonlocal_bind
// every address can; and on hosts of Kubernetes an interface that is down has
// the addresses of all services.) Throws std::system_error.
bool is_of_this_host(const SocketAddress& address);

// An interface of this host.
struct LocalInterface {
  std::string name{};
  // No cable is plugged into it (loopback, dummy): other hosts may have its
  // addresses as well.
  bool leads_nowhere = false;
};
// Returns the interface that is up and has `address`, if there is one. Throws
// std::system_error.
std::optional<LocalInterface> interface_of(const SocketAddress& address);

// Binds a socket for a store of several nodes at the host and port of
// `endpoint`, which resolves to `resolved` here. A numeric loopback address is
// bound as it is. Otherwise every interface is bound, for both address
// families: a resolver or a gateway may map the name or address to this host,
// and other nodes may reach it by another family. Returns what bind_socket()
// returns.
FileDescriptor bind_for_nodes(const Endpoint& endpoint,
                              const SocketAddress& resolved);

// Returns a socket that is connected to `address`, close-on-exec, and does not
// block; or an empty descriptor, and errno says why. Blocks for at most
// `allowed`.
FileDescriptor connect_to(const SocketAddress& address,
                          std::chrono::milliseconds allowed);

// Returns whether a process accepts connections at `address`: connects and
// closes again. Blocks for at most `allowed`.
bool accepts_connections(const SocketAddress& address,
                         std::chrono::milliseconds allowed);

// Returns the address from which this host speaks to `address`. Asks the
// routing table and sends nothing. Throws std::system_error.
std::string local_address_towards(const SocketAddress& address);

}  // namespace lockstep::internal
