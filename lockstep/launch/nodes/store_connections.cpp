#include "lockstep/launch/nodes/store_connections.h"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/endpoint.h"

namespace lockstep::internal {
namespace {

struct Connection {
  int fd;
  SocketAddress own;
  SocketAddress peer;
};

std::optional<SocketAddress> address_by(int (*ask)(int, sockaddr*, socklen_t*),
                                        int fd) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (ask(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0 ||
      (name.ss_family != AF_INET && name.ss_family != AF_INET6)) {
    return std::nullopt;
  }
  return SocketAddress(reinterpret_cast<sockaddr*>(&name), length);
}

std::vector<Connection> connections() {
  struct Closer {
    void operator()(DIR* directory) const { closedir(directory); }
  };
  const std::unique_ptr<DIR, Closer> open(opendir("/proc/self/fd"));
  std::vector<Connection> found;
  if (!open) return found;
  while (const dirent* entry = readdir(open.get())) {
    const int fd = static_cast<int>(std::strtol(entry->d_name, nullptr, 10));
    if (fd <= 2) continue;
    const auto own = address_by(getsockname, fd);
    const auto peer = own ? address_by(getpeername, fd) : std::nullopt;
    if (peer) found.push_back({fd, *own, *peer});
  }
  return found;
}

std::string name_of(const SocketAddress& side) {
  std::string host = side.host();
  // The peer uses IPv4, but the socket listens on IPv6.
  if (host.starts_with("::ffff:")) host = host.substr(7);
  return Endpoint{host, side.port()}.text();
}

void set_option(int fd, int option, int value) {
  setsockopt(fd, IPPROTO_TCP, option, &value, sizeof(value));
}

}  // namespace

std::set<std::string> connections_to(int port) {
  std::set<std::string> names;
  for (const auto& one : connections()) {
    if (one.peer.port() == port) names.insert(name_of(one.own));
  }
  return names;
}

std::set<std::string> connections_accepted_at(int port) {
  std::set<std::string> names;
  for (const auto& one : connections()) {
    if (one.own.port() == port) names.insert(name_of(one.peer));
  }
  return names;
}

void break_connections_of_dead_hosts(int port,
                                     std::chrono::milliseconds allowed) {
  for (const auto& one : connections()) {
    if (one.own.port() != port && one.peer.port() != port) continue;
    const int on = 1;
    setsockopt(one.fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    set_option(one.fd, TCP_KEEPIDLE, 1);
    set_option(one.fd, TCP_KEEPINTVL, 1);
    set_option(one.fd, TCP_USER_TIMEOUT, static_cast<int>(allowed.count()));
  }
}

void shut_connections_to(int port) {
  for (const auto& one : connections()) {
    if (one.peer.port() == port) ::shutdown(one.fd, SHUT_RDWR);
  }
}

}  // namespace lockstep::internal
