#include "lockstep/comm/store_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "lockstep/base/environment.h"

namespace lockstep {
namespace {

bool is_bound_to(int fd, uint16_t port) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         address.sin_family == AF_INET && ntohs(address.sin_port) == port;
}

// A copy, because the store closes what it is given and a later init needs it
// again. Nothing if a process between the launcher and this one closed it.
std::optional<FileDescriptor> inherited(uint16_t port) {
  auto fd = get_env_int("LOCKSTEP_MASTER_LISTEN_FD", 0, 1 << 20);
  if (!fd || !is_bound_to(static_cast<int>(*fd), port)) return std::nullopt;
  FileDescriptor copy(::fcntl(static_cast<int>(*fd), F_DUPFD_CLOEXEC, 3));
  if (!copy) throw_errno("duplicating LOCKSTEP_MASTER_LISTEN_FD");
  return copy;
}

std::optional<in_addr> ipv4_loopback(const std::string& host) {
  in_addr address{};
  const char* text = host == "localhost" ? "127.0.0.1" : host.c_str();
  if (::inet_pton(AF_INET, text, &address) != 1) return std::nullopt;
  if (ntohl(address.s_addr) >> 24 != 127) return std::nullopt;
  return address;
}

}  // namespace

std::optional<FileDescriptor> store_socket(const std::string& host,
                                           uint16_t port) {
  if (auto socket = inherited(port)) return socket;
  auto loopback = ipv4_loopback(host);
  if (!loopback) return std::nullopt;
  auto what = "opening the store at " + host + ":" + std::to_string(port);
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) throw_errno(what);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr = *loopback;
  int on = 1;
  // As the store's own: the launcher holds the port with a bound socket.
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) !=
          0 ||
      ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address),
             sizeof(address)) != 0) {
    throw_errno(what);
  }
  return socket;
}

}  // namespace lockstep
