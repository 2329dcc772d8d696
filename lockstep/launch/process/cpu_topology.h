#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace lockstep::internal {

// A logical CPU, as Linux numbers it, and what it shares with others.
struct Cpu {
  int number = 0;
  int node = 0;     // NUMA node
  int package = 0;  // socket
  // The smallest CPU of the same physical core, and of those that share the
  // highest level of cache; -1 if the kernel names no cache.
  int core = 0;
  int cache = -1;
};

// The CPUs that a process may use, in the order of their numbers.
using CpuTopology = std::vector<Cpu>;

// Reads what the kernel says about the CPUs `allowed`. What it does not say (a
// container may hide parts of sysfs) counts as one NUMA node, one package and
// one core for each CPU. `system` is the folder of sysfs.
CpuTopology read_cpu_topology(
    const std::set<int>& allowed,
    const std::string& system = "/sys/devices/system");

// Returns the CPUs of this thread's affinity mask (which respects a container's
// cpuset), or nothing if the kernel does not say.
std::set<int> allowed_cpus();

// Returns how many threads each worker should compute with, by local rank, at
// least 1: its share of the physical cores that it may use. `bound` has each
// worker's CPUs; a worker shares them with the workers that have the same.
// `granted` limits all workers together (granted_cores(), control_groups.h).
std::vector<int> share_of_cores(const CpuTopology& topology,
                                const std::vector<std::set<int>>& bound,
                                std::optional<double> granted);

}  // namespace lockstep::internal
