#pragma once

#include <chrono>
#include <set>
#include <string>

namespace lockstep {

// The TCP connections of this process to a store, or to the store that it
// hosts. Their sockets belong to a library (c10d) that tells nothing of them
// and waits for answers without end; they are found among the descriptors of
// this process. Any thread.
//
// A connection's name is the address and port of the side that connected, so
// that both sides know it by one name unless an address is translated between
// them.

// Returns the names of the connections that this process made to `port`.
std::set<std::string> connections_to(int port);
// Returns the names of those that it accepted at `port`.
std::set<std::string> connections_accepted_at(int port);

// Lets the kernel break every connection to, or accepted at, `port` once the
// other host has acknowledged nothing for `allowed`. A host that is up
// acknowledges for a process that is stopped, too.
void break_connections_of_dead_hosts(int port,
                                     std::chrono::milliseconds allowed);

// Shuts every connection that this process made to `port`, so that calls of
// other threads that wait for an answer fail.
void shut_connections_to(int port);

}  // namespace lockstep
