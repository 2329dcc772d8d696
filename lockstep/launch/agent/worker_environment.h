#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/nodes/round.h"

namespace lockstep::internal {

// The environment of one worker: torchrun's contract (PyTorch 2.13,
// elastic/agent/server/local_elastic_agent.py, _start_workers).
struct WorkerIdentity {
  int local_rank = 0;
  int local_world_size = 1;
  std::optional<NodePlace> place{};  // unset if there is one node
  // Its rank, if that is not `place.first_rank` + `local_rank`, because places
  // of its node were given up.
  std::optional<int> rank{};
  std::string role = "default";
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  int restart_count = 0;
  int max_restarts = 0;
  std::string run_id{};
  std::string error_file{};  // where a worker may write its exception as JSON
  std::string flight_directory{};  // where a worker writes its flight records
  int master_listen_fd = -1;       // rank 0 only: StorePort::fd()
  // AgentSocket::name(); empty if there is none.
  std::string agent_socket{};
  // The worker's GPU under --virtual-local-rank, as CUDA_VISIBLE_DEVICES names
  // it: it is the only one that the worker sees, and LOCAL_RANK is 0.
  std::optional<std::string> only_gpu{};
  std::string signals_to_handle{};   // --signals-to-handle
  std::optional<int> omp_threads{};  // --omp-threads
  // WorkerStoreService::name_for(); empty if there is no store for this worker.
  std::string store_socket{};
  std::string worker_store{};  // --worker-store; empty if it was not given
  // To be touched (hang_finder.h); empty if there is none.
  std::string progress_file{};
  // If the job heals (worker/healing_place.h): the generation that a worker
  // joins, 0 if it is started with its attempt, and the descriptor_mark() of
  // the memory of its place.
  bool heals = false;
  int generation = 0;
  std::string place_memory{};
};

// Returns the environment of a worker, entries "NAME=value" for execve:
// `inherited`, with the variables of the contract set. OMP_NUM_THREADS becomes
// `omp_threads`, or 1 if it is unset and there are several workers;
// TORCH_NCCL_ASYNC_ERROR_HANDLING becomes 1, and LOCKSTEP_FLIGHT_DIR the
// directory of flight records, if they are unset. In a job that heals
// THP_MEM_ALLOC_ENABLE, c10's name, becomes 1 if it is unset: large tensors
// then lie in huge pages. LOCKSTEP_AGENT_PLACE is the true local rank if
// LOCAL_RANK is not. LOCKSTEP_MASTER_LISTEN_FD is removed for every worker that
// does not inherit the descriptor, and LOCKSTEP_AGENT, LOCKSTEP_STORE,
// LOCKSTEP_PROGRESS_FILE and the variables of healing if there is none.
// LOCKSTEP_WORKER_STORE stays as it is unless `worker_store` is given.
std::vector<std::string> worker_environment(
    const WorkerIdentity& worker, const std::vector<std::string>& inherited);

// Returns the environment of a standby process (worker/standby_place.h),
// without LOCKSTEP_STANDBY: that of a worker, without the variables that differ
// between workers or attempts.
std::vector<std::string> standby_environment(
    const WorkerIdentity& worker, const std::vector<std::string>& inherited);

// Returns the environment of this process.
std::vector<std::string> current_environment();

// Returns whether worker_environment() will set OMP_NUM_THREADS; the command
// says so once.
bool limits_omp_threads(int local_world_size,
                        const std::vector<std::string>& inherited);

}  // namespace lockstep::internal
