#include "lockstep/launch/process/usable_cores.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "lockstep/launch/process/control_groups.h"
#include "lockstep/launch/process/cpu_topology.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// "50000 100000" is half a core, "max 100000" no limit.
std::optional<double> quota_of_version_2(const fs::path& group) {
  std::ifstream file(group / "cpu.max");
  double quota = 0;
  double period = 0;
  if (!(file >> quota >> period) || period <= 0) return std::nullopt;
  return quota / period;
}

std::optional<double> quota_of_version_1(const fs::path& group) {
  std::ifstream quota_file(group / "cpu.cfs_quota_us");
  std::ifstream period_file(group / "cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 ||
      period <= 0) {
    return std::nullopt;
  }
  return quota / period;
}

}  // namespace

int usable_cores() {
  int cores = static_cast<int>(internal::allowed_cpus().size());
  if (const auto granted = granted_cores()) {
    cores = std::min(cores, static_cast<int>(*granted));
  }
  return std::max(cores, 1);
}

std::optional<double> granted_cores(const std::string& root,
                                    const std::string& membership) {
  std::optional<double> least;
  for (const auto& group :
       internal::control_groups("cpu", {root, membership})) {
    const auto granted = group.version_1 ? quota_of_version_1(group.folder)
                                         : quota_of_version_2(group.folder);
    if (granted && (!least || *granted < *least)) least = granted;
  }
  return least;
}

}  // namespace lockstep
