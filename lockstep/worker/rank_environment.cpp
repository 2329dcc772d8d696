#include "lockstep/worker/rank_environment.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "lockstep/base/environment.h"
#include "lockstep/worker/standby_place.h"

namespace lockstep::internal {
namespace {

constexpr int64_t kMost = 1 << 24;
constexpr int kFirstPort = 20000;
constexpr int kPorts = 10000;

// The scheduler's description of the task that this process is.
struct Task {
  const char* scheduler;
  int64_t rank = 0;
  int64_t world_size = 1;
  std::optional<int64_t> local_rank{};
  std::optional<int64_t> local_world_size{};
  std::optional<std::string> first_host{};
  std::string job{};  // the same text for all tasks, another for other jobs
};

// Returns the first host of a list such as "a[07-09,12]-x,b".
std::string first_host_of(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    if (list.front() != '[') {
      host += list.front();
      list.remove_prefix(1);
      continue;
    }
    list.remove_prefix(1);
    host += list.substr(0, list.find_first_of("-,]"));
    const size_t end = list.find(']');
    if (end == std::string_view::npos) break;
    list.remove_prefix(end + 1);
  }
  return host;
}

// Returns the number of tasks on a node from a list such as "2(x3),1": two on
// each of the first three nodes, one on the last.
std::optional<int64_t> tasks_on(int64_t node, const std::string& list) {
  std::string_view rest = list;
  while (!rest.empty()) {
    std::string_view part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    int64_t nodes = 1;
    const size_t times = part.find("(x");
    if (times != std::string_view::npos) {
      std::string_view number = part.substr(times + 2);
      nodes = parse_int("SLURM_STEP_TASKS_PER_NODE",
                        number.substr(0, number.find(')')), 1, kMost);
      part = part.substr(0, times);
    }
    if (node < nodes) {
      return parse_int("SLURM_STEP_TASKS_PER_NODE", part, 1, kMost);
    }
    node -= nodes;
  }
  return std::nullopt;
}

std::optional<Task> task_of_slurm() {
  // A batch script has most variables of a step, but is none.
  const auto step = get_env("SLURM_STEP_ID");
  const auto size = get_env_int("SLURM_STEP_NUM_TASKS", 1, kMost);
  const auto rank = get_env_int("SLURM_PROCID", 0, kMost);
  if (!step || !size || !rank) return std::nullopt;
  Task task{.scheduler = "srun", .rank = *rank, .world_size = *size};
  task.local_rank = get_env_int("SLURM_LOCALID", 0, kMost);
  const auto node = get_env_int("SLURM_NODEID", 0, kMost);
  const auto tasks = get_env("SLURM_STEP_TASKS_PER_NODE");
  if (node && tasks) task.local_world_size = tasks_on(*node, *tasks);
  if (const auto nodes = get_env("SLURM_STEP_NODELIST")) {
    task.first_host = first_host_of(*nodes);
  }
  task.job = get_env("SLURM_JOB_ID").value_or("") + "." + *step;
  return task;
}

std::optional<Task> task_of_open_mpi() {
  const auto size = get_env_int("OMPI_COMM_WORLD_SIZE", 1, kMost);
  const auto rank = get_env_int("OMPI_COMM_WORLD_RANK", 0, kMost);
  if (!size || !rank) return std::nullopt;
  Task task{.scheduler = "mpirun", .rank = *rank, .world_size = *size};
  task.local_rank = get_env_int("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMost);
  task.local_world_size = get_env_int("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMost);
  task.job = get_env("PMIX_NAMESPACE")
                 .value_or(get_env("OMPI_MCA_ess_base_jobid").value_or(""));
  return task;
}

std::optional<Task> task_of_mpich() {
  const auto size = get_env_int("PMI_SIZE", 1, kMost);
  const auto rank = get_env_int("PMI_RANK", 0, kMost);
  if (!size || !rank) return std::nullopt;
  Task task{.scheduler = "mpiexec", .rank = *rank, .world_size = *size};
  task.local_rank = get_env_int("MPI_LOCALRANKID", 0, kMost);
  task.local_world_size = get_env_int("MPI_LOCALNRANKS", 1, kMost);
  task.job = get_env("PMI_JOBID").value_or(get_env("HYDI_JOBID").value_or(""));
  return task;
}

std::optional<Task> task() {
  auto found = task_of_slurm();
  if (!found) found = task_of_open_mpi();
  if (!found) found = task_of_mpich();
  if (!found || found->world_size < 2) return std::nullopt;
  // A launcher within the task started this process.
  const auto rank = get_env("RANK");
  const auto size = get_env("WORLD_SIZE");
  if (rank && *rank != std::to_string(found->rank)) return std::nullopt;
  if (size && *size != std::to_string(found->world_size)) return std::nullopt;
  return found;
}

std::string port_of(const Task& task) {
  // FNV-1a.
  uint64_t hash = 14695981039346656037ull;
  for (const char c : task.job + "/" + std::to_string(geteuid())) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  }
  return std::to_string(kFirstPort + static_cast<int>(hash % kPorts));
}

std::optional<std::string> text_of(const std::optional<int64_t>& number) {
  if (!number) return std::nullopt;
  return std::to_string(*number);
}

}  // namespace

std::optional<std::string> get_rank_env(const char* name) {
  if (stands_by()) refuse_early_reader(name);
  if (auto given = get_env(name)) return given;
  const auto found = task();
  if (!found) return std::nullopt;
  const std::string_view wanted = name;
  if (wanted == "RANK") return std::to_string(found->rank);
  if (wanted == "WORLD_SIZE") return std::to_string(found->world_size);
  if (wanted == "LOCAL_RANK") return text_of(found->local_rank);
  if (wanted == "LOCAL_WORLD_SIZE") return text_of(found->local_world_size);
  if (wanted == "MASTER_PORT") return port_of(*found);
  if (wanted == "MASTER_ADDR") {
    if (found->local_world_size == found->world_size) return "127.0.0.1";
    return found->first_host;
  }
  throw std::logic_error("no variable of a launcher: " + std::string(name));
}

std::optional<int64_t> get_rank_env_int(const char* name, int64_t lowest,
                                        int64_t highest) {
  const auto text = get_rank_env(name);
  if (!text) return std::nullopt;
  return parse_int(std::string("environment variable ") + name, *text, lowest,
                   highest);
}

std::optional<std::string> scheduler_of_ranks() {
  const auto found = task();
  if (!found) return std::nullopt;
  return found->scheduler;
}

}  // namespace lockstep::internal
