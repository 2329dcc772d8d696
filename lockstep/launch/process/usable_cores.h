#pragma once

#include <optional>
#include <string>

namespace lockstep {

// Returns the number of cores in this process's affinity mask (which respects a
// container's cpuset), but at most the whole cores that its control groups
// grant (granted_cores()), and at least 1.
int usable_cores();

// Returns how many cores' worth of time the strictest of this process's control
// groups grants: cpu.max (version 2), or cpu.cfs_quota_us divided by
// cpu.cfs_period_us (version 1). Looks at the group that `membership` names and
// at those that contain it, below `root`. Returns nothing if there is no limit.
std::optional<double> granted_cores(
    const std::string& root = "/sys/fs/cgroup",
    const std::string& membership = "/proc/self/cgroup");

}  // namespace lockstep
