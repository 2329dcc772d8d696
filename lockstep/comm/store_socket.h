#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep {

// The socket on which rank 0's store is to listen, bound and not listening:
// the one that the launcher holds for it (LOCKSTEP_MASTER_LISTEN_FD, see
// docs/launcher.md), else for a loopback `host` one of our own. Nothing for
// other hosts: the store makes its own socket then, on every interface.
//
// A store left to itself would listen on every interface for loopback, too,
// and look up the names of IPv4 clients at the name server, which takes 5 s
// where that does not answer.
//
// Throws std::system_error that names address and port if they are taken.
std::optional<FileDescriptor> store_socket(const std::string& host,
                                           uint16_t port);

// Waits until a store listens at `host` and `port`: nothing then, else, when
// the time is over, why it could not be reached ("Connection refused"). Looking
// up a name may take longer. LibTorch's client would wait up to twice its
// timeout, and print a stack trace.
std::optional<std::string> await_listener(const std::string& host,
                                          uint16_t port,
                                          const Deadline& deadline);

// The address by which this host reaches other networks, in numbers; its name
// where there is none. Asks the routing table and sends nothing.
std::string outward_address();

}  // namespace lockstep
