#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/file_descriptor.h"

namespace lockstep {

// A host and a TCP port, as the options name them.
struct Endpoint {
  std::string host{};  // a name or a numeric address, without brackets
  int port = 0;

  std::string text() const;  // "HOST:PORT", an IPv6 address in brackets
};

// "HOST", "HOST:PORT", "[V6]", "[V6]:PORT" or a bare IPv6 address. Throws
// std::invalid_argument that begins with `option`.
Endpoint parse_endpoint(std::string_view option, const std::string& text,
                        int default_port);

// One address that an endpoint means.
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
  SocketAddress with_port(int port) const;
  // Every address of the family.
  SocketAddress wildcard() const;

 private:
  sockaddr_storage storage_{};
  socklen_t length_;
};

// A name that means no address, at least at the moment.
class UnresolvedHost : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Looks a host up by the system's resolver and its timeouts; a numeric address
// needs none. Not empty. Throws UnresolvedHost with the host and the reason.
std::vector<SocketAddress> resolve(const Endpoint& endpoint);

// "localhost", or a numeric address of the loopback interface. A host's own
// name is not, although Debian maps it to 127.0.1.1: others reach it elsewhere.
bool names_loopback(const std::string& host);
bool is_numeric(const std::string& host);

// True for 0.0.0.0 and ::, which a server may bind and nobody can reach.
bool names_every_interface(const std::string& host);

// A bound socket, close-on-exec, with SO_REUSEADDR; every address of IPv6 takes
// in those of IPv4. Owns nothing where the system refuses; errno says why.
FileDescriptor bind_socket(const SocketAddress& address);
// The address that a socket is bound to. Throws std::system_error.
SocketAddress bound_address(int fd);

// Binds a store of several nodes at the host and port of `endpoint`, which
// means `resolved` here. A numeric address of loopback is taken at its word.
// Otherwise every interface is bound, since a resolver or a gateway may map the
// name or address to this host, and "localhost" may be what this node alone was
// given (a PyTorchJob's master), whatever family the others use. As
// bind_socket().
FileDescriptor bind_for_nodes(const Endpoint& endpoint,
                              const SocketAddress& resolved);

// True where something accepts connections there: connects and closes again.
// Blocks for at most `allowed`.
bool accepts_connections(const SocketAddress& address,
                         std::chrono::milliseconds allowed);

// The address of this host from which it speaks to `address`; asks the routing
// table, sends nothing. Throws std::system_error.
std::string local_address_towards(const SocketAddress& address);

}  // namespace lockstep
