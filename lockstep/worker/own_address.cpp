#include "lockstep/worker/own_address.h"

#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <memory>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/worker/rank_environment.h"

namespace lockstep::internal {

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" ||
         address.starts_with("127.");
}

// Connecting a datagram socket asks the routing table and sends nothing.
std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(
      found, &::freeaddrinfo);
  const FileDescriptor socket(
      ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local{};
  socklen_t length = sizeof(local);
  std::array<char, NI_MAXHOST> text{};
  if (!socket ||
      ::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local),
                    &length) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text.data(),
                    text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return text.data();
}

OwnAddress own_address(bool one_host) {
  if (auto interface = get_env("GLOO_SOCKET_IFNAME")) {
    return {.interface = *interface, .address = {}};
  }
  // Looking up the host's name instead takes seconds if a name server is slow.
  if (one_host) return {.interface = {}, .address = "127.0.0.1"};
  if (auto master = get_rank_env("MASTER_ADDR")) {
    auto address = address_towards(*master);
    // Debian's /etc/hosts calls a host's own name 127.0.1.1: peers on other
    // hosts need another of its addresses.
    if (!address.empty() && !is_loopback(address)) {
      return {.interface = {}, .address = std::move(address)};
    }
  }
  return {};
}

}  // namespace lockstep::internal
