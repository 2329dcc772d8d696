#include "lockstep/launch/process/store_port.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/endpoint.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookUpInterval{200};
// After this time the user is told what is being waited for.
constexpr milliseconds kLongLookUp{5000};

// The advice for an address that is not of this host.
constexpr const char* kAdviceForOneNode =
    "; on one host leave --master-addr out: 127.0.0.1 is used; for several "
    "give --nnodes";
constexpr const char* kAdviceForNodes =
    "; give this node --local-addr, a name or an address of this host by which "
    "the other nodes reach it";

[[noreturn]] void refuse(const std::string& address, int port, int error,
                         const char* advice) {
  const std::string where =
      "address " + address + " port " + std::to_string(port);
  if (error == EADDRINUSE) {
    throw std::invalid_argument(
        where +
        " is in use by another process; give another --master-port, "
        "or none: then a free one is taken");
  }
  if (error == EADDRNOTAVAIL) {
    throw std::invalid_argument("address " + address +
                                " is not an address of this host" + advice);
  }
  if (error == EACCES) {
    throw std::invalid_argument(where +
                                " needs privileges; give a "
                                "--master-port from 1024 up, or none");
  }
  errno = error;
  throw_errno("binding " + where);
}

std::vector<SocketAddress> look_up(const std::string& address, int port,
                                   const char* advice) {
  try {
    return resolve({address, port});
  } catch (const UnresolvedHost& error) {
    throw std::invalid_argument(std::string(error.what()) + advice);
  }
}

}  // namespace

std::optional<std::string> find_own_address(
    const std::string& address, milliseconds allowed,
    const std::function<void(const std::string& text)>& notice) {
  const Deadline deadline = Deadline::after(allowed);
  bool told = false;
  while (true) {
    try {
      for (const SocketAddress& one : resolve({address, 0})) {
        const bool every = one.host() == one.wildcard().host();
        if ((every || is_of_this_host(one)) && bind_socket(one)) {
          return one.host();
        }
      }
      return std::nullopt;
    } catch (const UnresolvedHost& error) {
      if (deadline.expired()) {
        throw std::invalid_argument(std::string(error.what()) +
                                    kAdviceForOneNode);
      }
      if (deadline.elapsed() > kLongLookUp && !std::exchange(told, true)) {
        notice(
            "waiting until the address of this job's one node is known, for "
            "at most " +
            seconds_text(allowed) + ": " + error.what());
      }
      std::this_thread::sleep_for(
          std::min(kLookUpInterval, deadline.remaining()));
    }
  }
}

StorePort StorePort::hold(const std::string& address, int port) {
  int error = EADDRNOTAVAIL;
  for (const SocketAddress& one : look_up(address, port, kAdviceForOneNode)) {
    if (FileDescriptor fd = bind_socket(one)) {
      const int number = bound_address(fd.get()).port();
      return StorePort(std::move(fd), address, number);
    }
    error = errno;
    // "localhost" may be two addresses: a port that is in use on one of them
    // counts as in use.
    if (error == EADDRINUSE) break;
  }
  refuse(address, port, error, kAdviceForOneNode);
}

StorePort StorePort::hold_for_nodes(const std::string& address,
                                    bool was_known) {
  // A name means every interface, whatever its address is.
  const SocketAddress first =
      was_known && !is_numeric(address)
          ? resolve({"0.0.0.0", 0}).front()
          : look_up(address, 0, kAdviceForNodes).front();
  FileDescriptor fd = bind_for_nodes({address, 0}, first);
  if (!fd) refuse(address, 0, errno, kAdviceForNodes);
  const int number = bound_address(fd.get()).port();
  return StorePort(std::move(fd), address, number);
}

}  // namespace lockstep::internal
