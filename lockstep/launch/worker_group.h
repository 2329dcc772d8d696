#pragma once

#include <signal.h>
#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/output_mux.h"
#include "lockstep/launch/output_options.h"
#include "lockstep/launch/program.h"
#include "lockstep/launch/round_plan.h"
#include "lockstep/launch/run_directory.h"
#include "lockstep/launch/worker_failure.h"
#include "lockstep/launch/worker_process.h"

namespace lockstep {

// What all rounds of a launch have in common.
struct WorkerGroupOptions {
  Program program{};
  int nproc_per_node = 1;
  int max_restarts = 0;
  std::string role = "default";
  std::string run_id{};
  OutputOptions output{};
};

// The workers of one node in one round (an attempt, in torchrun's words), local
// ranks 0 to nproc_per_node - 1. Local rank 0 has the launcher's stdin, the
// others /dev/null: several readers of one terminal would share its lines by
// chance. Not thread-safe, as WorkerProcess.
class WorkerGroup {
 public:
  // Starts every worker; those already started are killed, not reaped, when
  // one cannot be. `master_listen_fd` is StorePort::fd() where this node has
  // rank 0, else -1. Throws ProgramError, std::system_error.
  WorkerGroup(const WorkerGroupOptions& options, const RoundPlan& plan,
              int master_listen_fd, const RunDirectory& directory,
              const sigset_t& signal_mask, OutputMux& mux);

  // To every worker that has not ended.
  void signal_process_groups(int signal) const;
  void kill_workers() const;  // SIGKILL to the workers themselves

  // Takes note of what waitpid() gave; children that are no workers of this
  // group are passed over.
  void set_ended(pid_t pid, int wait_status);

  size_t size() const { return workers_.size(); }
  size_t running() const;
  // The worker that failed first. Among those reaped together, one that a
  // signal ended comes first, as its peers' failures are mostly its echo; then
  // the lowest rank. `settle()` closes the choice.
  std::optional<WorkerFailure> first_failure() const;
  bool failed() const { return failed_ != nullptr; }
  void settle() { settled_ = true; }

 private:
  const WorkerProcess* more_telling(const WorkerProcess* one,
                                    const WorkerProcess* other) const;

  int first_rank_;
  std::vector<WorkerProcess> workers_;
  std::vector<std::filesystem::path> error_files_;
  const WorkerProcess* failed_ = nullptr;
  bool settled_ = false;
};

}  // namespace lockstep
