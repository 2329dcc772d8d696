#include "lockstep/comm/store_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <system_error>
#include <thread>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

// An IPv4 or IPv6 address.
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

// Returns a copy of the launcher's socket, because the store closes what it is
// given and a later init_process_group() needs the socket again. Returns
// nothing if a process between the launcher and this one closed it.
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

// Connects and hangs up at once. Returns 0 or errno.
int try_to_connect(const addrinfo& to, const Deadline& deadline) {
  // The limit of one address, so that the others of the host get their turn.
  constexpr std::chrono::milliseconds kOneAddress{3'000};
  const FileDescriptor socket(
      ::socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return errno;
  if (::connect(socket.get(), to.ai_addr, to.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd polled{.fd = socket.get(), .events = POLLOUT, .revents = 0};
  const auto limit =
      Deadline::after(std::min(deadline.remaining(), kOneAddress));
  int ready = 0;
  do {
    ready = ::poll(&polled, 1, static_cast<int>(limit.remaining().count()));
  } while (ready < 0 && errno == EINTR);
  if (ready < 0) return errno;
  if (ready == 0) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
    return errno;
  }
  return error;
}

// Returns nothing if a process listens there, otherwise why none could be
// reached.
std::optional<std::string> why_unreachable(const std::string& host,
                                           uint16_t port,
                                           const Deadline& deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(
          host.c_str(), std::to_string(port).c_str(), &hints, &found)) {
    return ::gai_strerror(error);
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(
      found, &::freeaddrinfo);
  int error = 0;
  for (const auto* to = found; to != nullptr; to = to->ai_next) {
    error = try_to_connect(*to, deadline);
    if (error == 0) return std::nullopt;
  }
  return std::generic_category().message(error);
}

}  // namespace

std::optional<std::string> await_listener(const std::string& host,
                                          uint16_t port,
                                          const Deadline& deadline) {
  constexpr std::chrono::milliseconds kLongestRetryPause{200};
  for (std::chrono::milliseconds pause{1};;
       pause = std::min(2 * pause, kLongestRetryPause)) {
    const auto why = why_unreachable(host, port, deadline);
    if (!why || deadline.expired()) return why;
    std::this_thread::sleep_for(std::min(pause, deadline.remaining()));
  }
}

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
  // The store sets SO_REUSEADDR, too: the launcher holds the port with a bound
  // socket.
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) !=
          0 ||
      ::bind(socket.get(), address->get(), address->size) != 0) {
    throw_errno(what);
  }
  return socket;
}

std::string outward_address() {
  const FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // Any address beyond this host will do: this one belongs to no host (RFC
  // 5737).
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
  return host_name();
}

}  // namespace lockstep::internal
