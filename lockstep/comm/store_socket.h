#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// Returns the socket on which rank 0's store is to listen, bound and not
// listening: the one that the launcher holds for it (LOCKSTEP_MASTER_LISTEN_FD,
// see docs/internals/launcher.md), otherwise one of our own if `host` is
// loopback. Returns nothing for other hosts: the store then makes its own
// socket, on every interface.
//
// With a socket of its own the store would listen on every interface for
// loopback, too. It would also look up the names of IPv4 clients at the name
// server, which takes 5 s if that does not answer.
//
// Throws std::system_error that names address and port if they are taken.
std::optional<FileDescriptor> store_socket(const std::string& host,
                                           uint16_t port);

// Waits until a store listens at `host` and `port`, and returns nothing then.
// When the time is over, returns why the store could not be reached
// ("Connection refused"). Looking up a name may take longer than the deadline.
// LibTorch's client would wait up to twice its timeout, and print a stack
// trace.
std::optional<std::string> await_listener(const std::string& host,
                                          uint16_t port,
                                          const Deadline& deadline);

// Returns the address by which this host reaches other networks, in numbers, or
// the host's name if there is none. Asks the routing table and sends nothing.
std::string outward_address();

}  // namespace lockstep::internal
