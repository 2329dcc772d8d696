#pragma once

#include <string>

namespace lockstep::internal {

// Returns the name that gethostname() gives to this machine; "localhost" if it
// has none.
std::string host_name();

}  // namespace lockstep::internal
