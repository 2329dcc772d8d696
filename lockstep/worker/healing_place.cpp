#include "lockstep/worker/healing_place.h"

#include <limits>

#include "lockstep/base/environment.h"

namespace lockstep::internal {

bool job_heals() { return get_env(kHealVariable) == "1"; }

int generation_joined() {
  return static_cast<int>(
      get_env_int(kGenerationVariable, 0, std::numeric_limits<int>::max())
          .value_or(0));
}

}  // namespace lockstep::internal
