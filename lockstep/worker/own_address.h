#pragma once

#include <string>

namespace lockstep::internal {

// Returns whether `address` is a loopback address in numbers, or "localhost".
bool is_loopback(const std::string& address);

// Returns the address of this host from which `host` is reached, in numbers;
// empty if that cannot be told. Sends nothing to `host`, but blocks while its
// name is looked up, for as long as the system's resolver allows.
std::string address_towards(const std::string& host);

// Where a rank of this host listens for the connections of the backend "gloo".
struct OwnAddress {
  std::string interface;  // if not empty, this interface, as the user says
  std::string address;    // otherwise this address, in numbers
  // If both are empty, what the host's own name means; loopback if it means
  // nothing.
};

// Returns the interface that GLOO_SOCKET_IFNAME names: one, while Python also
// takes several, separated by commas. Without the variable, it returns
// loopback if `one_host` says that all ranks are on this host; otherwise the
// address from which MASTER_ADDR is reached, unless that is loopback. Blocks as
// address_towards() does.
OwnAddress own_address(bool one_host);

}  // namespace lockstep::internal
