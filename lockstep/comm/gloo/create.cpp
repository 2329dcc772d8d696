#include "lockstep/comm/gloo/create.h"

#include <gloo/context.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/comm/backend_traits.h"

namespace lockstep::internal::gloo {
namespace {

// A rank that leaves because of an error must not keep its peers waiting, so
// abort() closes its connections: operations in which peers wait for this rank
// then fail at once. (That does not wake this rank's own operations that wait
// for a peer.)
class Gloo final : public c10d::ProcessGroupGloo, public BackendTraits {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  bool failure_needs_abort() const override { return true; }

  void abort() override {
    for (auto& context : contexts_) context->closeConnections();
  }
};

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" ||
         address.starts_with("127.");
}

// Whether the environment says that all ranks are on this host. If so, loopback
// is all that is needed; Gloo's own way, to look up the host's name, takes
// seconds if a name server is slow.
bool on_one_host(int size) {
  if (size == 1) return true;
  auto local = get_env("LOCAL_WORLD_SIZE");
  if (local && local == get_env("WORLD_SIZE")) return true;
  return is_loopback(get_env("MASTER_ADDR").value_or(""));
}

// Returns the address of this host from which `host` is reached, in numbers;
// empty if that cannot be told. Connecting a datagram socket asks the routing
// table and sends nothing.
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

std::shared_ptr<::gloo::transport::Device> choose_device(int size) {
  if (auto interface = get_env("GLOO_SOCKET_IFNAME")) {  // as in Python
    return c10d::ProcessGroupGloo::createDeviceForInterface(*interface);
  }
  if (on_one_host(size)) {
    return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  }
  // Gloo's default, the address of the host's own name, is often loopback.
  if (auto master = get_env("MASTER_ADDR")) {
    auto address = address_towards(*master);
    // Debian's /etc/hosts calls a host's own name 127.0.1.1: peers on other
    // hosts need another of its addresses.
    if (!address.empty() && !is_loopback(address)) {
      return c10d::ProcessGroupGloo::createDeviceForHostname(address);
    }
  }
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  options->group_name = request.group_name;
  options->global_ranks_in_group.assign(request.global_ranks.begin(),
                                        request.global_ranks.end());
  options->devices.push_back(choose_device(request.size));
  return c10::make_intrusive<Gloo>(request.store, request.rank, request.size,
                                   options);
}

}  // namespace lockstep::internal::gloo
