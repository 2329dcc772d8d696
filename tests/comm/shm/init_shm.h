// The default group of the tests of the shared-memory backend.
#pragma once

#include <chrono>

#include "lockstep/comm/init.h"

namespace lockstep::internal::testing {

inline ProcessGroupGuard init_shm() {
  return init_process_group("cpu:shm", {.timeout = std::chrono::seconds(30)});
}

}  // namespace lockstep::internal::testing
