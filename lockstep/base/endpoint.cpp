#include "lockstep/base/endpoint.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

SocketAddress every_interface(int port) {
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_addr = in6addr_any;
  any.sin6_port = htons(static_cast<uint16_t>(port));
  return {reinterpret_cast<sockaddr*>(&any), sizeof(any)};
}

struct AddressListDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

}  // namespace

std::string Endpoint::text() const {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Endpoint parse_endpoint(std::string_view option, const std::string& text,
                        int default_port) {
  const auto refuse = [&] {
    throw std::invalid_argument(std::string(option) + " is \"" + text +
                                "\"; allowed is HOST or HOST:PORT, an IPv6 "
                                "address in brackets: [::1]:29400");
  };
  Endpoint endpoint{text, default_port};
  std::string port;
  bool has_port = false;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string::npos) refuse();
    endpoint.host = text.substr(1, end - 1);
    const std::string rest = text.substr(end + 1);
    has_port = !rest.empty();
    if (has_port && rest[0] != ':') refuse();
    if (has_port) port = rest.substr(1);
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    const size_t colon = text.find(':');
    endpoint.host = text.substr(0, colon);
    port = text.substr(colon + 1);
    has_port = true;
  }
  const bool odd = endpoint.host.find_first_of(" /[]") != std::string::npos;
  if (endpoint.host.empty() || odd) refuse();
  if (has_port) {
    endpoint.port = static_cast<int>(
        parse_int("the port of " + std::string(option), port, 0, 65535));
  }
  return endpoint;
}

SocketAddress::SocketAddress(const sockaddr* address, socklen_t length)
    : length_(length) {
  std::memcpy(&storage_, address, std::min<size_t>(length, sizeof(storage_)));
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6*>(get())->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&v6) ||
           (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(get());
  return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
}

std::string SocketAddress::host() const {
  char text[NI_MAXHOST] = "";
  getnameinfo(get(), length_, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return text;
}

int SocketAddress::port() const {
  // The port has the same place in sockaddr_in and sockaddr_in6.
  return ntohs(reinterpret_cast<const sockaddr_in*>(get())->sin_port);
}

SocketAddress SocketAddress::wildcard() const {
  SocketAddress every = *this;
  if (family() == AF_INET6) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&every.storage_);
    v6->sin6_addr = in6addr_any;
    v6->sin6_scope_id = 0;
  } else {
    reinterpret_cast<sockaddr_in*>(&every.storage_)->sin_addr.s_addr =
        htonl(INADDR_ANY);
  }
  return every;
}

std::vector<SocketAddress> resolve(const Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(),
                  &hints, &found);
  if (error != 0) {
    throw UnresolvedHost("address \"" + endpoint.host +
                         "\" cannot be resolved (" + gai_strerror(error) + ")");
  }
  const std::unique_ptr<addrinfo, AddressListDeleter> list(found);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* entry = list.get(); entry != nullptr;
       entry = entry->ai_next) {
    addresses.emplace_back(entry->ai_addr, entry->ai_addrlen);
  }
  return addresses;
}

bool is_numeric(const std::string& host) {
  in6_addr any;
  return inet_pton(AF_INET, host.c_str(), &any) == 1 ||
         inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &any) == 1;
}

bool names_loopback(const std::string& host) {
  if (host == "localhost") return true;
  return is_numeric(host) && resolve({host, 0}).front().is_loopback();
}

FileDescriptor bind_socket(const SocketAddress& address) {
  FileDescriptor fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return fd;
  const int on = 1;
  const int off = 0;
  if (address.family() == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(fd.get(), address.get(), address.length()) != 0) {
    const int error = errno;
    fd.reset();
    errno = error;
  }
  return fd;
}

SocketAddress bound_address(int fd) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0) {
    throw_errno("getsockname");
  }
  return {reinterpret_cast<sockaddr*>(&name), length};
}

bool names_every_interface(const std::string& host) {
  if (!is_numeric(host)) return false;
  const SocketAddress address = resolve({host, 0}).front();
  return address.host() == address.wildcard().host();
}

FileDescriptor bind_for_nodes(const Endpoint& endpoint,
                              const SocketAddress& resolved) {
  if (is_numeric(endpoint.host) && resolved.is_loopback()) {
    return bind_socket(resolved);
  }
  FileDescriptor fd = bind_socket(every_interface(resolved.port()));
  // A host without IPv6 cannot bind this address.
  if (fd || errno == EADDRINUSE) return fd;
  return bind_socket(resolved.wildcard());
}

bool is_of_this_host(const SocketAddress& address) {
  return address.is_loopback() || interface_of(address).has_value();
}

std::optional<LocalInterface> interface_of(const SocketAddress& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) throw_errno("listing this host's addresses");
  std::optional<LocalInterface> found;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    const int family = one->ifa_addr != nullptr ? one->ifa_addr->sa_family : -1;
    if ((family != AF_INET && family != AF_INET6) ||
        (one->ifa_flags & IFF_UP) == 0) {
      continue;
    }
    const socklen_t length =
        family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (SocketAddress(one->ifa_addr, length).host() != address.host()) continue;
    const bool is_tunnel = (one->ifa_flags & IFF_POINTOPOINT) != 0;
    found = {one->ifa_name,
             (one->ifa_flags & (IFF_LOOPBACK | IFF_NOARP)) != 0 && !is_tunnel};
    break;
  }
  freeifaddrs(all);
  return found;
}

FileDescriptor connect_to(const SocketAddress& address,
                          std::chrono::milliseconds allowed) {
  const auto refused = [](int error) {
    errno = error;
    return FileDescriptor();
  };
  FileDescriptor fd(::socket(address.family(),
                             SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return {};
  if (::connect(fd.get(), address.get(), address.length()) == 0) return fd;
  int error = errno;
  if (error == EINPROGRESS) {
    pollfd entry{fd.get(), POLLOUT, 0};
    socklen_t size = sizeof(error);
    if (poll(&entry, 1, static_cast<int>(allowed.count())) != 1) {
      error = ETIMEDOUT;
    } else if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
      error = errno;
    }
  }
  if (error != 0) {
    fd.reset();
    return refused(error);
  }
  // If no process listens on the port, this very socket may be given it; it is
  // then connected to itself.
  const SocketAddress own = bound_address(fd.get());
  if (own.port() == address.port() && own.host() == address.host()) {
    fd.reset();
    return refused(ECONNREFUSED);
  }
  return fd;
}

bool accepts_connections(const SocketAddress& address,
                         std::chrono::milliseconds allowed) {
  return static_cast<bool>(connect_to(address, allowed));
}

std::string local_address_towards(const SocketAddress& address) {
  const FileDescriptor fd(
      ::socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), address.get(), address.length()) != 0) {
    throw_errno("finding this host's address towards " + address.host());
  }
  return bound_address(fd.get()).host();
}

}  // namespace lockstep::internal
