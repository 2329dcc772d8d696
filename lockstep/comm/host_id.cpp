#include "lockstep/comm/host_id.h"

#include <exception>

#include "lockstep/base/environment.h"
#include "lockstep/comm/shm/protocol/handshake.h"

namespace lockstep::internal {

std::optional<std::string> host_id() {
  if (auto given = get_env("LOCKSTEP_HOST_ID")) return "given " + *given;
  try {
    return shm::host_identity();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace lockstep::internal
