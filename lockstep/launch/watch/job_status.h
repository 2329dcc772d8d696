#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// One worker of an agent, in the attempt that runs or ran last.
struct WorkerStatus {
  int local_rank = 0;
  int rank = 0;  // -1 if the job goes on without it
  pid_t pid = 0;
  std::optional<int> exit_code{};  // nothing while it runs
  std::optional<int> signal{};     // that killed it
  bool publishes = false;          // it has the board (status_publisher.h)
};

// An agent's knowledge of its job, and of its own node's workers.
struct JobStatus {
  enum class State {
    waiting,   // for the other nodes
    running,   // its workers run
    stopping,  // its workers are being stopped
    ended,     // its workers have ended; the job has not
  };

  std::string run_id{};
  std::vector<std::string> program{};  // argv
  pid_t agent_pid = 0;
  std::string host{};
  State state = State::waiting;
  int64_t started_ns = 0;  // of the agent, on the steady clock
  int node_rank = 0;
  int nnodes = 1;
  int world_size = 1;
  int restart = 0;   // restarts used, healings included
  int healings = 0;  // how often a process took the place of one that failed
  int max_restarts = 0;
  std::string attempt_directory{};
  int standby = 0;  // standby processes of this node that wait for a place
  std::vector<WorkerStatus> workers{};  // by local rank
};

const char* name_of(JobStatus::State state);  // "running", ...

std::string to_json(const JobStatus& status);
// Throws std::invalid_argument if `json` is not what to_json() returns.
JobStatus job_status_of(const std::string& json);

}  // namespace lockstep::internal
