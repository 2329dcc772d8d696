#include "lockstep/comm/store_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "lockstep/base/environment.h"

namespace lockstep {
namespace {

// An address of either family.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  in_port_t* port() {
    return storage.ss_family == AF_INET6
               ? &reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port
               : &reinterpret_cast<sockaddr_in*>(&storage)->sin_port;
  }
};

bool is_bound_to(int fd, uint16_t port) {
  Address address;
  return ::getsockname(fd, address.get(), &address.size) == 0 &&
         (address.storage.ss_family == AF_INET ||
          address.storage.ss_family == AF_INET6) &&
         ntohs(*address.port()) == port;
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

std::optional<Address> loopback_address(const std::string& host,
                                        uint16_t port) {
  Address address;
  const char* text = host == "localhost" ? "127.0.0.1" : host.c_str();
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (::inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
    if (ntohl(v4->sin_addr.s_addr) >> 24 != 127) return std::nullopt;
    address.storage.ss_family = AF_INET;
    address.size = sizeof(*v4);
  } else if (::inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
    if (!IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)) return std::nullopt;
    address.storage.ss_family = AF_INET6;
    address.size = sizeof(*v6);
  } else {
    return std::nullopt;
  }
  *address.port() = htons(port);
  return address;
}

}  // namespace

std::optional<FileDescriptor> store_socket(const std::string& host,
                                           uint16_t port) {
  if (auto socket = inherited(port)) return socket;
  auto address = loopback_address(host, port);
  if (!address) return std::nullopt;
  auto what = "opening the store at " + host + ":" + std::to_string(port);
  FileDescriptor socket(
      ::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) throw_errno(what);
  int on = 1;
  // As the store's own: the launcher holds the port with a bound socket.
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) !=
          0 ||
      ::bind(socket.get(), address->get(), address->size) != 0) {
    throw_errno(what);
  }
  return socket;
}

std::string outward_address() {
  const FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // Any address beyond this host will do: one that is nobody's (RFC 5737).
  sockaddr_in far{};
  far.sin_family = AF_INET;
  far.sin_port = htons(9);
  ::inet_pton(AF_INET, "192.0.2.1", &far.sin_addr);
  sockaddr_in own{};
  socklen_t length = sizeof(own);
  std::array<char, INET_ADDRSTRLEN> text{};
  if (socket &&
      ::connect(socket.get(), reinterpret_cast<sockaddr*>(&far), sizeof(far)) ==
          0 &&
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) ==
          0 &&
      ::inet_ntop(AF_INET, &own.sin_addr, text.data(), text.size())) {
    return text.data();
  }
  std::array<char, HOST_NAME_MAX + 1> name{};
  if (::gethostname(name.data(), name.size()) != 0) throw_errno("gethostname");
  return name.data();
}

}  // namespace lockstep
