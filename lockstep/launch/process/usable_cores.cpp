#include "lockstep/launch/process/usable_cores.h"

#include <algorithm>

#include "lockstep/base/control_groups.h"
#include "lockstep/launch/process/cpu_topology.h"

namespace lockstep {

int usable_cores() {
  int cores = static_cast<int>(internal::allowed_cpus().size());
  if (const auto granted = internal::granted_cores()) {
    cores = std::min(cores, static_cast<int>(*granted));
  }
  return std::max(cores, 1);
}

}  // namespace lockstep
