#include "lockstep/cli/doctor/numa.h"
#include "lockstep/launch/process/system_file.h"

#include <algorithm>
#include <vector>

namespace lockstep::internal {

Finding check_numa(const MachineRoots& roots) {
  Finding finding{.name = "NUMA"};
  const auto nodes = roots.sys / "devices/system/node";
  const auto mine = numbers_of(
      field_of(roots.proc / "self/status", "Cpus_allowed_list").value_or(""));
  size_t count = 0;
  size_t usable = 0;
  std::string cores;
  for (const int node : numbers_of(first_line(nodes / "online").value_or(""))) {
    const std::string list =
        first_line(nodes / ("node" + std::to_string(node)) / "cpulist")
            .value_or("");
    if (list.empty()) continue;  // memory without cores
    ++count;
    cores += (cores.empty() ? "" : " and ") + list;
    usable += std::ranges::any_of(numbers_of(list), [&](int core) {
      return std::ranges::find(mine, core) != mine.end();
    });
  }
  finding.values = {{"nodes", count}, {"usable", usable}};
  if (count < 2) {  // or a kernel that knows nothing of nodes
    finding.found = "all cores reach all memory equally fast";
    return finding;
  }
  finding.found = std::to_string(count) + " nodes, with the cores " + cores +
                  "; this process may use " + std::to_string(usable);
  if (usable > 1) {
    finding.advise(Health::ok,
                   "A rank is fastest if it stays on one node: lockstep run "
                   "--numa-binding=node.");
  }
  return finding;
}

}  // namespace lockstep::internal
