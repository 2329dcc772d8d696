#include "lockstep/base/control_groups.h"

#include <algorithm>
#include <charconv>
#include <fstream>

#include "lockstep/base/system_file.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

// Version 1 writes "no limit" as the largest number of whole pages.
constexpr int64_t kNoLimit = int64_t{1} << 60;

// "50000 100000" in cpu.max is half a core, "max 100000" no limit. Version 1
// has the two numbers in two files, and -1 for no limit.
std::optional<double> cores_of(const ControlGroup& group) {
  std::ifstream file(group.folder /
                     (group.version_1 ? "cpu.cfs_quota_us" : "cpu.max"));
  std::ifstream other(group.folder / "cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  const bool read =
      (file >> quota) && ((group.version_1 ? other : file) >> period);
  return read && quota > 0 && period > 0 ? std::optional(quota / period)
                                         : std::nullopt;
}

// Returns the value of a line "key value"; 0 if there is none.
int64_t value_of(const fs::path& path, const std::string& key) {
  int64_t value = 0;
  const std::string text = field_of(path, key, ' ').value_or("");
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// A file of a limit holds "max" if there is none, and so no number.
std::optional<GroupLimit> pids_of(const ControlGroup& group) {
  const auto limit = number_in(group.folder / "pids.max");
  if (!limit) return std::nullopt;
  return GroupLimit{*limit,
                    number_in(group.folder / "pids.current").value_or(0)};
}

std::optional<GroupLimit> memory_of(const ControlGroup& group) {
  const bool old = group.version_1;
  const auto limit =
      number_in(group.folder / (old ? "memory.limit_in_bytes" : "memory.max"));
  if (!limit || *limit >= kNoLimit) return std::nullopt;
  const auto used = number_in(
      group.folder / (old ? "memory.usage_in_bytes" : "memory.current"));
  const int64_t returnable =
      value_of(group.folder / "memory.stat",
               old ? "total_inactive_file" : "inactive_file");
  return GroupLimit{*limit,
                    std::max<int64_t>(used.value_or(0) - returnable, 0)};
}

std::optional<GroupLimit> least_left(
    const std::string& controller, const ControlGroupPlace& place,
    std::optional<GroupLimit> (*limit_of)(const ControlGroup&)) {
  std::optional<GroupLimit> least;
  for (const auto& group : control_groups(controller, place)) {
    const auto one = limit_of(group);
    if (one && (!least || one->left() < least->left())) least = one;
  }
  return least;
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& controller,
                                         const ControlGroupPlace& place) {
  std::ifstream file(place.membership);
  std::vector<ControlGroup> groups;
  // "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1.
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers =
        "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version_1 = controllers != ",,";
    if (version_1 &&
        controllers.find("," + controller + ",") == controllers.npos) {
      continue;
    }
    const fs::path top = version_1 ? place.root / controller : place.root;
    // In a container the path may be the host's; the container's group is then
    // `top` itself.
    fs::path folder = top / fs::path(line.substr(second + 1)).relative_path();
    while (true) {
      groups.push_back({folder, version_1});
      if (folder == top || !folder.has_relative_path()) break;
      folder = folder.parent_path();
    }
  }
  return groups;
}

std::optional<double> granted_cores(const ControlGroupPlace& place) {
  std::optional<double> least;
  for (const auto& group : control_groups("cpu", place)) {
    const auto granted = cores_of(group);
    if (granted && (!least || *granted < *least)) least = granted;
  }
  return least;
}

std::optional<GroupLimit> memory_limit(const ControlGroupPlace& place) {
  return least_left("memory", place, &memory_of);
}

std::optional<GroupLimit> thread_limit(const ControlGroupPlace& place) {
  return least_left("pids", place, &pids_of);
}

int64_t oom_kills(const ControlGroupPlace& place) {
  // The first group is that of the process; version 2 counts what is within it,
  // too.
  for (const auto& group : control_groups("memory", place)) {
    const fs::path file = group.folder / (group.version_1 ? "memory.oom_control"
                                                          : "memory.events");
    if (field_of(file, "oom_kill", ' ')) return value_of(file, "oom_kill");
  }
  return 0;
}

}  // namespace lockstep::internal
