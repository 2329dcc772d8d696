#pragma once

#include <chrono>
#include <set>
#include <string>

namespace lockstep::internal {

// The TCP connections of this process to a store, or to the store that it
// hosts. The sockets belong to a library (c10d) that gives no access to them
// and waits for answers without a limit. So these functions find them among the
// descriptors of this process. Any thread may call them.
//
// A connection's name is the address and port of the side that connected. Both
// sides know it by that one name unless a gateway between them translates
// addresses.

// Returns the names of the connections that this process made to `port`.
std::set<std::string> connections_to(int port);
// Returns the names of the connections that this process accepted at `port`.
std::set<std::string> connections_accepted_at(int port);

// Makes the kernel break every connection to `port`, or accepted at it, once
// the other host has acknowledged nothing for `allowed`. The kernel of a host
// that is up acknowledges even for a process that is stopped.
void break_connections_of_dead_hosts(int port,
                                     std::chrono::milliseconds allowed);

// Shuts every connection that this process made to `port`, so that calls in
// which other threads wait for an answer fail.
void shut_connections_to(int port);

}  // namespace lockstep::internal
