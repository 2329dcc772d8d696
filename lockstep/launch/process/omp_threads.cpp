#include "lockstep/launch/process/omp_threads.h"

#include <algorithm>

namespace lockstep::internal {

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
