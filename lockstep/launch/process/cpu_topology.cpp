#include "lockstep/launch/process/cpu_topology.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>

#include "lockstep/base/system_file.h"
#include "lockstep/launch/process/visible_gpus.h"

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

namespace fs = std::filesystem;

[[noreturn]] void refuse_binding(const std::string& text) {
  throw std::invalid_argument("--numa-binding: " + text);
}

// CPUs by something that they share.
using Groups = std::map<int, std::set<int>>;

// Groups the CPUs of one NUMA node by `member`.
Groups group_node(const CpuTopology& topology, int node, int Cpu::*member) {
  Groups groups;
  for (const Cpu& cpu : topology) {
    if (cpu.node == node) groups[cpu.*member].insert(cpu.number);
  }
  return groups;
}

std::set<int> cpus_with(const CpuTopology& topology, int Cpu::*member,
                        int value) {
  std::set<int> cpus;
  for (const Cpu& cpu : topology) {
    if (cpu.*member == value) cpus.insert(cpu.number);
  }
  return cpus;
}

// Returns the share of the device with number `at` among `devices` of a node.
// If the cores cannot be divided equally, the first devices get one more.
std::set<int> exclusive_share(const CpuTopology& topology, int node, int at,
                              int devices) {
  const Groups cores = group_node(topology, node, &Cpu::core);
  const int count = static_cast<int>(cores.size());
  if (count < devices) {
    refuse_binding(
        "exclusive gives each rank cores of its own, but of NUMA node " +
        std::to_string(node) + " this process may use " +
        std::to_string(count) + " for " + std::to_string(devices) +
        " ranks or GPUs; start fewer, or give node");
  }
  const int share = count / devices;
  const int extra = count % devices;
  const int begin = at * share + std::min(at, extra);
  const int end = begin + share + (at < extra ? 1 : 0);
  std::set<int> cpus;
  for (auto core = std::next(cores.begin(), begin);
       core != std::next(cores.begin(), end); ++core) {
    cpus.insert(core->second.begin(), core->second.end());
  }
  return cpus;
}

// Returns the core complex of the device with number `at` of a node: the one
// with most CPUs first, and all in turn.
std::set<int> core_complex(const CpuTopology& topology, int node, int at) {
  const Groups caches = group_node(topology, node, &Cpu::cache);
  std::vector<std::set<int>> complexes;
  for (const auto& [cache, cpus] : caches) complexes.push_back(cpus);
  std::ranges::stable_sort(complexes, [](const auto& one, const auto& other) {
    return one.size() > other.size();
  });
  return complexes[static_cast<size_t>(at) % complexes.size()];
}

// "GPU UUID:   GPU-1f2e..." is a line of the driver's file about a GPU.
std::string uuid_in(const fs::path& information) {
  std::ifstream file(information);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("GPU UUID:")) continue;
    const size_t begin = line.find("GPU-");
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return {};
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

NumaBinding parse_numa_binding(const std::string& text) {
  const std::map<std::string, NumaBinding> known{
      {"node", NumaBinding::node},
      {"socket", NumaBinding::socket},
      {"exclusive", NumaBinding::exclusive},
      {"core-complex", NumaBinding::core_complex}};
  const auto found = known.find(text);
  if (found != known.end()) return found->second;
  throw std::invalid_argument("--numa-binding is \"" + text +
                              "\"; allowed are node, socket, exclusive and "
                              "core-complex");
}

std::vector<std::set<int>> bind_to_cpus(NumaBinding binding,
                                        const CpuTopology& topology,
                                        const std::vector<int>& node_of_device,
                                        int workers) {
  if (std::ssize(node_of_device) < workers) {
    refuse_binding("the driver lists " + std::to_string(node_of_device.size()) +
                   " GPUs (/proc/driver/nvidia/gpus) for " +
                   std::to_string(workers) +
                   " workers, so their NUMA nodes are not known; leave the "
                   "option out");
  }
  std::vector<std::set<int>> bound;
  for (int worker = 0; worker < workers; ++worker) {
    const auto device = node_of_device.begin() + worker;
    const int node = *device;
    // The number of this device among those of its node.
    const int at =
        static_cast<int>(std::count(node_of_device.begin(), device, node));
    const auto of_node = std::ranges::find(topology, node, &Cpu::node);
    if (of_node == topology.end()) {
      refuse_binding(
          "local rank " + std::to_string(worker) + " belongs to NUMA node " +
          std::to_string(node) +
          ", of which this process may use no CPU (its affinity mask or "
          "cpuset); allow some, or leave the option out");
    }
    switch (binding) {
      case NumaBinding::node:
        bound.push_back(cpus_with(topology, &Cpu::node, node));
        break;
      case NumaBinding::socket:
        bound.push_back(cpus_with(topology, &Cpu::package, of_node->package));
        break;
      case NumaBinding::exclusive:
        bound.push_back(exclusive_share(
            topology, node, at,
            static_cast<int>(std::ranges::count(node_of_device, node))));
        break;
      case NumaBinding::core_complex:
        bound.push_back(core_complex(topology, node, at));
        break;
    }
  }
  return bound;
}

std::vector<int> spread_over_nodes(const CpuTopology& topology, int workers) {
  std::set<int> distinct;
  for (const Cpu& cpu : topology) distinct.insert(cpu.node);
  if (distinct.empty()) distinct = {0};
  const std::vector<int> nodes(distinct.begin(), distinct.end());
  std::vector<int> spread;
  for (int worker = 0; worker < workers; ++worker) {
    spread.push_back(nodes[static_cast<size_t>(worker) * nodes.size() /
                           static_cast<size_t>(workers)]);
  }
  return spread;
}

std::vector<int> numa_nodes_of_gpus(const std::string& root) {
  const fs::path listed = fs::path(root) / "proc/driver/nvidia/gpus";
  // The names are addresses on the PCI bus, of equal length: "0000:18:00.0".
  std::set<std::string> addresses;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(listed, ignored)) {
    addresses.insert(entry.path().filename());
  }
  std::vector<std::string> uuids;
  std::vector<int> nodes;
  for (const std::string& address : addresses) {
    uuids.push_back(uuid_in(listed / address / "information"));
    int node = 0;
    std::ifstream(fs::path(root) / "sys/bus/pci/devices" / address /
                  "numa_node") >>
        node;
    nodes.push_back(std::max(node, 0));  // -1 if the host has one node
  }
  std::vector<int> of_visible;
  for (const std::string& device :
       visible_gpu_names(static_cast<int>(addresses.size()))) {
    size_t at = nodes.size();
    if (device.find_first_not_of("0123456789") == std::string::npos) {
      at = static_cast<size_t>(std::stoi(device));
    } else if (device.starts_with("GPU-")) {
      at = static_cast<size_t>(
          std::ranges::find_if(uuids,
                               [&](const std::string& uuid) {
                                 return uuid.starts_with(device);
                               }) -
          uuids.begin());
    }
    if (at >= nodes.size()) {
      refuse_binding(
          "CUDA_VISIBLE_DEVICES has \"" + device +
          "\", whose NUMA node the driver does not tell "
          "(/proc/driver/nvidia/gpus); name GPUs by numbers or UUIDs, or "
          "leave the option out");
    }
    of_visible.push_back(nodes[at]);
  }
  return of_visible;
}

}  // namespace lockstep::internal
