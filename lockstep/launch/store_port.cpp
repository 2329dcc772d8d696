#include "lockstep/launch/store_port.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace lockstep {
namespace {

struct AddressListDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressListDeleter>;

AddressList look_up(const std::string& address, int port) {
  // torchrun writes an IPv6 address in brackets; the resolver wants it bare.
  std::string host = address;
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error =
      getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    throw std::invalid_argument(
        "address \"" + address + "\" cannot be resolved (" +
        gai_strerror(error) +
        "); on one host leave --master-addr out: 127.0.0.1 is used");
  }
  return AddressList(list);
}

int bound_port(int fd) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0) {
    throw_errno("getsockname of the store's port");
  }
  // The port stands at the same place in sockaddr_in and sockaddr_in6.
  return ntohs(reinterpret_cast<sockaddr_in*>(&name)->sin_port);
}

[[noreturn]] void refuse(const std::string& address, int port, int error) {
  const std::string where =
      "address " + address + " port " + std::to_string(port);
  if (error == EADDRINUSE) {
    throw std::invalid_argument(
        where +
        " is in use by another process; give another --master-port, "
        "or none: then a free one is taken");
  }
  if (error == EADDRNOTAVAIL) {
    throw std::invalid_argument(
        "address " + address +
        " is not an address of this host, and workers on several hosts are "
        "not supported yet; leave --master-addr out: 127.0.0.1 is used");
  }
  if (error == EACCES) {
    throw std::invalid_argument(where +
                                " needs privileges; give a "
                                "--master-port from 1024 up, or none");
  }
  errno = error;
  throw_errno("binding " + where);
}

}  // namespace

StorePort StorePort::hold(const std::string& address, int port) {
  const AddressList list = look_up(address, port);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* entry = list.get(); entry != nullptr;
       entry = entry->ai_next) {
    FileDescriptor fd(
        ::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) {
      error = errno;
      continue;
    }
    const int on = 1;
    if (setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0) {
      throw_errno("SO_REUSEADDR of the store's port");
    }
    if (::bind(fd.get(), entry->ai_addr, entry->ai_addrlen) == 0) {
      const int number = bound_port(fd.get());
      return StorePort(std::move(fd), address, number);
    }
    error = errno;
    // "localhost" may be two addresses: a port taken on one is taken.
    if (error == EADDRINUSE) break;
  }
  refuse(address, port, error);
}

}  // namespace lockstep
