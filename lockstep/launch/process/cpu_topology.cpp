#include "lockstep/launch/process/cpu_topology.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>

#include "lockstep/launch/process/system_file.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

// Returns the CPUs of a list in a file; none if there is no such file.
std::vector<int> cpus_in(const fs::path& path) {
  return numbers_of(first_line(path).value_or(""));
}

int small_number(const fs::path& path) {
  return static_cast<int>(number_in(path).value_or(0));
}

// Calls `visit` with each entry of `folder` whose name is `prefix` and a
// number, and with that number.
template <typename Visit>
void for_each_numbered(const fs::path& folder, std::string_view prefix,
                       const Visit& visit) {
  for (const auto& name : names_in(folder)) {
    if (!name.starts_with(prefix)) continue;
    int number = 0;
    const char* end = name.data() + name.size();
    const auto parsed =
        std::from_chars(name.data() + prefix.size(), end, number);
    if (parsed.ec == std::errc() && parsed.ptr == end) {
      visit(folder / name, number);
    }
  }
}

int smallest_sharing_last_cache(const fs::path& cpu) {
  int highest = 0;
  int smallest = -1;
  for_each_numbered(cpu / "cache", "index", [&](const fs::path& cache, int) {
    const auto type = first_line(cache / "type");
    if (type != "Unified" && type != "Data") return;
    const int level = small_number(cache / "level");
    const auto sharing = cpus_in(cache / "shared_cpu_list");
    if (level <= highest || sharing.empty()) return;
    highest = level;
    smallest = std::ranges::min(sharing);
  });
  return smallest;
}

}  // namespace

CpuTopology read_cpu_topology(const std::set<int>& allowed,
                              const std::string& system) {
  std::map<int, int> node_of;
  for_each_numbered(fs::path(system) / "node", "node",
                    [&](const fs::path& folder, int node) {
                      for (const int cpu : cpus_in(folder / "cpulist"))
                        node_of[cpu] = node;
                    });
  CpuTopology topology;
  for (const int number : allowed) {
    const fs::path folder =
        fs::path(system) / "cpu" / ("cpu" + std::to_string(number));
    const fs::path place = folder / "topology";
    const auto siblings = cpus_in(place / "thread_siblings_list");
    Cpu cpu;
    cpu.number = number;
    if (const auto node = node_of.find(number); node != node_of.end()) {
      cpu.node = node->second;
    }
    cpu.package = small_number(place / "physical_package_id");
    cpu.core = siblings.empty() ? number : std::ranges::min(siblings);
    cpu.cache = smallest_sharing_last_cache(folder);
    topology.push_back(cpu);
  }
  return topology;
}

std::set<int> allowed_cpus() {
  std::set<int> cpus;
  // The kernel refuses a mask that is shorter than its own, so this grows it
  // until it fits.
  for (size_t size = 1024; size <= 1 << 20 && cpus.empty(); size *= 2) {
    cpu_set_t* mask = CPU_ALLOC(size);
    if (mask == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(size);
    if (sched_getaffinity(0, bytes, mask) == 0) {
      for (size_t cpu = 0; cpu < size; ++cpu) {
        if (CPU_ISSET_S(cpu, bytes, mask)) cpus.insert(static_cast<int>(cpu));
      }
    }
    CPU_FREE(mask);
  }
  return cpus;
}

std::vector<int> share_of_cores(const CpuTopology& topology,
                                const std::vector<std::set<int>>& bound,
                                std::optional<double> granted) {
  std::vector<int> threads;
  for (const auto& cpus : bound) {
    std::set<int> cores;
    for (const Cpu& cpu : topology) {
      if (cpus.contains(cpu.number)) cores.insert(cpu.core);
    }
    const auto sharers = std::ranges::count(bound, cpus);
    auto share =
        static_cast<double>(cores.size()) / static_cast<double>(sharers);
    if (granted) {
      share = std::min(share, *granted / static_cast<double>(bound.size()));
    }
    threads.push_back(std::max(static_cast<int>(share), 1));
  }
  return threads;
}

}  // namespace lockstep::internal
