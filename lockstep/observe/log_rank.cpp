#include "lockstep/observe/log_rank.h"

#include <limits>

#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"
#include "lockstep/worker/rank_environment.h"

namespace lockstep::internal {

int log_rank() {
  if (is_initialized()) return get_rank();
  return static_cast<int>(
      get_rank_env_int("RANK", 0, std::numeric_limits<int>::max()).value_or(0));
}

int log_world_size() {
  if (is_initialized()) return get_world_size();
  return static_cast<int>(
      get_rank_env_int("WORLD_SIZE", 1, std::numeric_limits<int>::max())
          .value_or(1));
}

}  // namespace lockstep::internal
