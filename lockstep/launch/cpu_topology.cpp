#include "lockstep/launch/cpu_topology.h"

#include <sched.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<int> read_number(const fs::path& path) {
  int number = 0;
  if (std::ifstream(path) >> number) return number;
  return std::nullopt;
}

// Calls `visit` with each entry of `folder` whose name is `prefix` and a
// number, and with that number.
template <typename Visit>
void for_each_numbered(const fs::path& folder, std::string_view prefix,
                       const Visit& visit) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(prefix)) continue;
    int number = 0;
    const char* end = name.data() + name.size();
    const auto parsed =
        std::from_chars(name.data() + prefix.size(), end, number);
    if (parsed.ec == std::errc() && parsed.ptr == end) {
      visit(entry.path(), number);
    }
  }
}

int smallest_sharing_last_cache(const fs::path& cpu) {
  int highest = 0;
  int smallest = -1;
  for_each_numbered(cpu / "cache", "index", [&](const fs::path& cache, int) {
    const std::string type = first_line(cache / "type");
    if (type != "Unified" && type != "Data") return;
    const int level = read_number(cache / "level").value_or(0);
    const auto sharing = parse_cpu_list(first_line(cache / "shared_cpu_list"));
    if (level <= highest || sharing.empty()) return;
    highest = level;
    smallest = *sharing.begin();
  });
  return smallest;
}

}  // namespace

CpuTopology read_cpu_topology(const std::set<int>& allowed,
                              const std::string& system) {
  std::map<int, int> node_of;
  for_each_numbered(
      fs::path(system) / "node", "node", [&](const fs::path& folder, int node) {
        for (const int cpu : parse_cpu_list(first_line(folder / "cpulist"))) {
          node_of[cpu] = node;
        }
      });
  CpuTopology topology;
  for (const int number : allowed) {
    const fs::path folder =
        fs::path(system) / "cpu" / ("cpu" + std::to_string(number));
    const fs::path place = folder / "topology";
    const auto siblings =
        parse_cpu_list(first_line(place / "thread_siblings_list"));
    Cpu cpu;
    cpu.number = number;
    if (const auto node = node_of.find(number); node != node_of.end()) {
      cpu.node = node->second;
    }
    cpu.package = read_number(place / "physical_package_id").value_or(0);
    cpu.core = siblings.empty() ? number : *siblings.begin();
    cpu.cache = smallest_sharing_last_cache(folder);
    topology.push_back(cpu);
  }
  return topology;
}

std::set<int> parse_cpu_list(std::string_view text) {
  constexpr int kMostCpus = 1 << 20;
  std::set<int> cpus;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    int first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc()) return cpus;
    int last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc()) return cpus;
    }
    for (int cpu = first; cpu <= last && cpu < kMostCpus; ++cpu) {
      cpus.insert(cpu);
    }
    if (parsed.ptr == end || *parsed.ptr != ',') return cpus;
    at = parsed.ptr + 1;
  }
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

}  // namespace lockstep::internal
