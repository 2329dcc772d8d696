#include "lockstep/launch/agent/worker_environment.h"

#include <unistd.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "lockstep/launch/nodes/job_secret.h"
#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/standby_place.h"

namespace lockstep::internal {
namespace {

bool defines(const std::string& entry, std::string_view name) {
  return entry.size() > name.size() && entry.starts_with(name) &&
         entry[name.size()] == '=';
}

bool contains(const std::vector<std::string>& entries, std::string_view name) {
  return std::any_of(entries.begin(), entries.end(),
                     [&](const auto& entry) { return defines(entry, name); });
}

void remove(std::vector<std::string>& entries, std::string_view name) {
  std::erase_if(entries,
                [&](const auto& entry) { return defines(entry, name); });
}

void set(std::vector<std::string>& entries, std::string_view name,
         const std::string& value) {
  remove(entries, name);
  entries.push_back(std::string(name) + "=" + value);
}

}  // namespace

std::vector<std::string> current_environment() {
  std::vector<std::string> entries;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    entries.emplace_back(*entry);
  }
  return entries;
}

bool limits_omp_threads(int local_world_size,
                        const std::vector<std::string>& inherited) {
  return local_world_size > 1 && !contains(inherited, "OMP_NUM_THREADS");
}

std::vector<std::string> worker_environment(
    const WorkerIdentity& worker, const std::vector<std::string>& inherited) {
  std::vector<std::string> entries = inherited;
  const NodePlace place =
      worker.place.value_or(NodePlace::alone(worker.local_world_size));
  const auto set_number = [&](std::string_view name, int number) {
    set(entries, name, std::to_string(number));
  };
  // An agent around this launcher has other places.
  remove(entries, "LOCKSTEP_AGENT_PLACE");
  remove(entries, kStandbyVariable);
  remove(entries, kStandbySocketVariable);
  if (worker.only_gpu) {
    set_number("LOCAL_RANK", 0);
    set_number("LOCKSTEP_AGENT_PLACE", worker.local_rank);
    set(entries, "CUDA_VISIBLE_DEVICES", *worker.only_gpu);
  } else {
    set_number("LOCAL_RANK", worker.local_rank);
  }
  const int rank = worker.rank.value_or(place.first_rank + worker.local_rank);
  set_number("RANK", rank);
  set_number("ROLE_RANK", place.first_role_rank + rank - place.first_rank);
  set_number("GROUP_RANK", place.node_rank);
  set(entries, "ROLE_NAME", worker.role);
  set_number("LOCAL_WORLD_SIZE", worker.local_world_size);
  set_number("WORLD_SIZE", place.world_size);
  set_number("ROLE_WORLD_SIZE", place.role_world_size);
  set_number("GROUP_WORLD_SIZE", place.nnodes);
  set(entries, "MASTER_ADDR", worker.master_addr);
  set_number("MASTER_PORT", worker.master_port);
  set_number("TORCHELASTIC_RESTART_COUNT", worker.restart_count);
  set(entries, "TORCHELASTIC_MAX_RESTARTS",
      std::to_string(worker.max_restarts));
  set(entries, "TORCHELASTIC_RUN_ID", worker.run_id);
  // Python's spelling. The workers' store is hosted by rank 0, not by the
  // launcher.
  set(entries, "TORCHELASTIC_USE_AGENT_STORE", "False");
  set(entries, "TORCHELASTIC_ERROR_FILE", worker.error_file);
  if (!worker.signals_to_handle.empty()) {
    // For a launcher of Python that a worker starts, as under torchrun.
    set(entries, "TORCHELASTIC_SIGNALS_TO_HANDLE", worker.signals_to_handle);
  }
  if (!contains(inherited, "TORCH_NCCL_ASYNC_ERROR_HANDLING")) {
    set(entries, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  }
  // A process that takes a place writes all its memory for the first time while
  // the others wait. In huge pages, for which c10 asks by this name, that takes
  // a fraction of the time.
  if (worker.heals && !contains(inherited, "THP_MEM_ALLOC_ENABLE")) {
    set(entries, "THP_MEM_ALLOC_ENABLE", "1");
  }
  // Empty counts as unset (get_env()).
  if (!contains(inherited, "LOCKSTEP_FLIGHT_DIR") ||
      std::ranges::count(inherited, "LOCKSTEP_FLIGHT_DIR=") > 0) {
    set(entries, "LOCKSTEP_FLIGHT_DIR", worker.flight_directory);
  }
  if (worker.omp_threads) {
    set_number("OMP_NUM_THREADS", *worker.omp_threads);
  } else if (limits_omp_threads(worker.local_world_size, inherited)) {
    set(entries, "OMP_NUM_THREADS", "1");
  }
  if (worker.master_listen_fd >= 0) {
    set(entries, "LOCKSTEP_MASTER_LISTEN_FD",
        std::to_string(worker.master_listen_fd));
  } else {
    // A value that a launcher around this one has set would name a descriptor
    // that this worker does not have.
    remove(entries, "LOCKSTEP_MASTER_LISTEN_FD");
  }
  if (!worker.worker_store.empty()) {
    set(entries, "LOCKSTEP_WORKER_STORE", worker.worker_store);
  }
  // The program must not see the secret by which the agents prove who they are.
  remove(entries, kJobSecretVariable);
  // Values of a launcher around this one are about other workers.
  for (const auto& [name, value] :
       {std::pair("LOCKSTEP_AGENT", worker.agent_socket),
        std::pair("LOCKSTEP_STORE", worker.store_socket),
        std::pair("LOCKSTEP_PROGRESS_FILE", worker.progress_file),
        std::pair(kHealVariable, std::string(worker.heals ? "1" : "")),
        std::pair(kGenerationVariable, worker.generation > 0
                                           ? std::to_string(worker.generation)
                                           : std::string()),
        std::pair(kPlaceMemoryVariable, worker.place_memory)}) {
    value.empty() ? remove(entries, name) : set(entries, name, value);
  }
  return entries;
}

std::vector<std::string> standby_environment(
    const WorkerIdentity& worker, const std::vector<std::string>& inherited) {
  std::vector<std::string> entries = worker_environment(worker, inherited);
  for (const char* name :
       {"LOCAL_RANK", "RANK", "ROLE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE",
        "WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR",
        "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE",
        "LOCKSTEP_AGENT_PLACE", "LOCKSTEP_PROGRESS_FILE"}) {
    remove(entries, name);
  }
  // If it is empty, each attempt has another one.
  std::erase(entries, "LOCKSTEP_FLIGHT_DIR=");
  return entries;
}

}  // namespace lockstep::internal
