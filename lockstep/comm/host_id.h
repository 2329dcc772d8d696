#pragma once

#include <optional>
#include <string>

namespace lockstep::internal {

// Returns a text that is equal for processes that are on one host and may share
// memory: LOCKSTEP_HOST_ID if it is set, otherwise shm::host_identity(). None
// if the system does not tell.
std::optional<std::string> host_id();

}  // namespace lockstep::internal
