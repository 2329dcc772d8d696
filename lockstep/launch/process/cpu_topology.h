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

// To which CPUs a worker is bound, with torchrun's names and rules
// (torch/numa/binding.py). In each mode the NUMA node is that of the worker's
// device: the GPU whose number is the worker's local rank.
enum class NumaBinding {
  node,          // all CPUs of the node
  socket,        // all CPUs of the node's socket, which may have several nodes
  exclusive,     // an equal share of the node's physical cores
  core_complex,  // the cores of the node that share one last-level cache
};

// Throws std::invalid_argument that names --numa-binding.
NumaBinding parse_numa_binding(const std::string& text);

// Returns the CPUs of each worker, by local rank. `topology` has the CPUs that
// this process may use. `node_of_device` is the NUMA node of each device, also
// of those that no worker uses: an exclusive share is the same however many of
// the devices are used. Throws std::invalid_argument, one line, if there are
// fewer devices than `workers`, if a node has no CPU of `topology`, or too few
// cores for an exclusive share each.
std::vector<std::set<int>> bind_to_cpus(NumaBinding binding,
                                        const CpuTopology& topology,
                                        const std::vector<int>& node_of_device,
                                        int workers);

// Returns a NUMA node for each of `workers` that use no GPU: neighbouring ranks
// on one node, and equally many on all nodes of `topology`, as far as possible.
// torchrun has no rule for them.
std::vector<int> spread_over_nodes(const CpuTopology& topology, int workers);

// Returns the NUMA node of each GPU that CUDA_VISIBLE_DEVICES leaves visible,
// in the order of CUDA's numbers, without asking CUDA. That is the order of the
// addresses on the PCI bus, which is CUDA's own unless a host has GPUs of
// different models and CUDA_DEVICE_ORDER is not PCI_BUS_ID. `root` is the
// folder with /proc and /sys. Throws std::invalid_argument, one line, if the
// driver does not list a GPU or the variable names one by a MIG identifier.
std::vector<int> numa_nodes_of_gpus(const std::string& root = "/");

}  // namespace lockstep::internal
