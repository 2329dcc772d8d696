#pragma once

#include <optional>
#include <set>
#include <vector>

#include "lockstep/launch/process/cpu_topology.h"

namespace lockstep::internal {

// Returns how many threads each worker should compute with, by local rank, at
// least 1: its share of the physical cores that it may use. `bound` has each
// worker's CPUs; a worker shares them with the workers that have the same.
// `granted` limits all workers together (granted_cores(), usable_cores.h).
std::vector<int> share_of_cores(const CpuTopology& topology,
                                const std::vector<std::set<int>>& bound,
                                std::optional<double> granted);

}  // namespace lockstep::internal
