#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// The address and port at which rank 0 of one attempt will open its c10d store,
// held so that no other process can take them: a TCP socket bound with
// SO_REUSEADDR that does not listen. Linux then refuses the port to every
// socket without SO_REUSEADDR and never hands it out as a free one. But rank
// 0's TCPStore, which sets SO_REUSEADDR, can bind it and listen. Measured with
// LibTorch 2.13, which binds the wildcard address.
//
// Rank 0 also inherits the descriptor and may listen on it instead
// (environment variable LOCKSTEP_MASTER_LISTEN_FD). Then all processes that
// have the descriptor share a listening socket, so the port stays open until
// each has closed it.
class StorePort {
 public:
  // Binds `address` (a numeric address, "localhost" or a name of this host) and
  // `port`, 0 for a free one. A name is looked up by the system's resolver,
  // with its timeouts. Throws std::invalid_argument that names address and port
  // if they are in use or not of this host.
  static StorePort hold(const std::string& address, int port);

  // Binds a free port for workers of several nodes, which reach this one by
  // `address` (bind_for_nodes(), endpoint.h). If that is a name that
  // `was_known` at an earlier call, it may be unknown now. Throws what hold()
  // throws.
  static StorePort hold_for_nodes(const std::string& address,
                                  bool was_known = false);

  const std::string& address() const { return address_; }  // as it was given
  int port() const { return port_; }
  // Bound, not listening, close-on-exec.
  int fd() const { return socket_.get(); }

 private:
  StorePort(FileDescriptor socket, std::string address, int port)
      : socket_(std::move(socket)), address_(std::move(address)), port_(port) {}

  FileDescriptor socket_;
  std::string address_;
  int port_;
};

// Returns the address, in numbers, at which StorePort::hold() can hold a port
// for workers of this host alone that are told `address`; nothing if it is not
// an address of this host, such as that of a Service of Kubernetes. Blocks for
// at most `allowed` (and one look-up) while a name has no address, as that of a
// new pod; calls `notice` once with a line for the user if that takes long.
// Throws std::invalid_argument if the name has no address in that time.
std::optional<std::string> find_own_address(
    const std::string& address, std::chrono::milliseconds allowed,
    const std::function<void(const std::string& text)>& notice);

}  // namespace lockstep::internal
