#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// Where this process's control groups are: the file systems' root, and the file
// that names the groups of the process.
struct ControlGroupPlace {
  std::filesystem::path root = "/sys/fs/cgroup";
  std::filesystem::path membership = "/proc/self/cgroup";
};

// A group of which this process is a member.
struct ControlGroup {
  std::filesystem::path folder;
  bool version_1;
};

// Returns the groups that may limit what `controller` ("cpu", "memory", "pids")
// gives to this process: in each hierarchy that has it the process's own group,
// then the groups around that one, out to the root. Empty if there are none.
std::vector<ControlGroup> control_groups(const std::string& controller,
                                         const ControlGroupPlace& place = {});

// Returns how many cores' worth of time the strictest of this process's control
// groups grants: cpu.max (version 2), or cpu.cfs_quota_us divided by
// cpu.cfs_period_us (version 1). Nothing if no group has a limit.
std::optional<double> granted_cores(const ControlGroupPlace& place = {});

// A limit, and how much of it is used.
struct GroupLimit {
  int64_t limit = 0;
  // The memory that all processes of that group use. Memory that the kernel
  // would give back (pages of files that were not read lately) does not count.
  int64_t used = 0;
  int64_t left() const { return limit > used ? limit - used : 0; }
};

// Both return the limit that leaves the least: of memory in bytes, of processes
// and threads by their number. Nothing if no group has a limit.
std::optional<GroupLimit> memory_limit(const ControlGroupPlace& place = {});
std::optional<GroupLimit> thread_limit(const ControlGroupPlace& place = {});

// Returns how many processes of this process's control group the kernel has
// killed since the group was made, because memory had run out; 0 if no group
// counts them.
int64_t oom_kills(const ControlGroupPlace& place = {});

}  // namespace lockstep::internal
