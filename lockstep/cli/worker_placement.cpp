#include "lockstep/cli/worker_placement.h"

#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/launch/process/cpu_topology.h"
#include "lockstep/launch/process/numa_binding.h"
#include "lockstep/launch/process/usable_cores.h"
#include "lockstep/launch/process/visible_gpus.h"

namespace lockstep::internal {
namespace {

constexpr int kMostThreads = 4096;

// Local rank n has GPU n, as torchrun assumes it. If there are fewer GPUs than
// workers, the workers compute on CPUs.
std::vector<int> nodes_of_workers(const CpuTopology& topology, int workers) {
  return visible_gpus() >= workers ? numa_nodes_of_gpus()
                                   : spread_over_nodes(topology, workers);
}

std::vector<std::string> one_gpu_each(int workers) {
  std::vector<std::string> gpus;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    for (int at = 0; at < workers; ++at) gpus.push_back(std::to_string(at));
    return gpus;
  }
  const std::string_view list = visible;
  // No GPU at all, in the two ways in which that is said.
  if (list.empty() || list == "-1") return std::vector<std::string>(workers);
  gpus = named_gpus(list);
  if (std::ssize(gpus) < workers) {
    throw std::invalid_argument(
        "--virtual-local-rank gives each worker one GPU of "
        "CUDA_VISIBLE_DEVICES, which is \"" +
        std::string(visible) + "\" and names " + std::to_string(gpus.size()) +
        ", and there are " + std::to_string(workers) +
        " workers; name one for each (a number, GPU-... or MIG-...), or start "
        "fewer");
  }
  return gpus;
}

int parse_threads(const std::string& text) {
  try {
    return static_cast<int>(parse_int("--omp-threads", text, 1, kMostThreads));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(error.what()) + ", or auto");
  }
}

}  // namespace

void place_workers(const RunArguments& arguments, WorkerGroupOptions& workers) {
  const int count = workers.nproc_per_node;
  if (arguments.virtual_local_rank) workers.only_gpus = one_gpu_each(count);

  const bool share = arguments.omp_threads == "auto";
  if (!share && !arguments.omp_threads.empty()) {
    workers.omp_threads.assign(static_cast<size_t>(count),
                               parse_threads(arguments.omp_threads));
  }
  if (!share && arguments.numa_binding.empty()) return;
  const std::set<int> allowed = allowed_cpus();
  const CpuTopology topology = read_cpu_topology(allowed);
  if (!arguments.numa_binding.empty()) {
    workers.cpus =
        bind_to_cpus(parse_numa_binding(arguments.numa_binding), topology,
                     nodes_of_workers(topology, count), count);
  }
  if (share) {
    workers.omp_threads = share_of_cores(
        topology,
        workers.cpus.empty()
            ? std::vector<std::set<int>>(static_cast<size_t>(count), allowed)
            : workers.cpus,
        granted_cores());
  }
}

}  // namespace lockstep::internal
