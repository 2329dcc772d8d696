#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/output_mux.h"
#include "lockstep/launch/process_guardian.h"
#include "lockstep/launch/run_directory.h"
#include "lockstep/launch/store_port.h"
#include "lockstep/launch/worker_group.h"

namespace lockstep {

struct LocalAgentOptions {
  WorkerGroupOptions workers{};
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: a free one, another in every round
  // After a signal from the user or the scheduler was forwarded: how long the
  // workers have, for a last snapshot, until SIGKILL.
  std::chrono::milliseconds shutdown_timeout{30'000};
  // After a worker failed: how long the others have from SIGTERM to SIGKILL.
  // Short, since they mostly wait for the one that is gone.
  std::chrono::milliseconds failure_shutdown_timeout{500};
};

// The elastic agent of one host: starts the workers, watches them, stops all
// when one fails, starts them anew while restarts are left, passes signals on.
// After torchrun's LocalElasticAgent, but driven by events: it sleeps until a
// child ends, output comes or the guardian writes. One thread. Requires all
// signals blocked (run_guarded() sees to that).
class LocalAgent {
 public:
  // Called with text for the user, without a name before it or a newline
  // behind, and never in the midst of a worker's line of up to PIPE_BUF bytes
  // that the mux carries.
  using Report = std::function<void(const std::string& text)>;

  LocalAgent(LocalAgentOptions options, const RunDirectory& directory,
             StorePort first_port, GuardianLink link, Report report);

  // Blocks until no worker, and nothing that a worker started, is left.
  // Returns the exit code of the launch: 0, or the first failing worker's in
  // the last round (128 + signal where a signal killed it), or 128 + signal
  // where a forwarded signal ended the job. Throws ProgramError,
  // std::invalid_argument and std::system_error where a round cannot be
  // started; nothing is left then either.
  int run();

 private:
  // Why a round is being stopped, and since when.
  struct Stop {
    int signal = 0;  // the forwarded one; 0 after a failure
    std::optional<Deadline> kill_at{};
    bool killed = false;
    bool given_up = false;
  };

  std::optional<WorkerFailure> run_round(int restart_count,
                                         const StorePort& port);
  void wait_for_event(WorkerGroup& group, const Stop& stop);
  void serve_guardian(WorkerGroup& group, Stop& stop);
  static void kill_now(Stop& stop);
  void forward(WorkerGroup& group, Stop& stop, int signal);
  void enforce_deadline(WorkerGroup& group, Stop& stop);
  void end_leftovers(WorkerGroup& group);

  LocalAgentOptions options_;
  const RunDirectory& directory_;
  std::optional<StorePort> port_;
  GuardianLink link_;
  Report report_;
  FileDescriptor child_events_;  // signalfd of SIGCHLD
  OutputMux mux_;
  std::vector<pollfd> entries_;
  int ending_signal_ = 0;  // the first forwarded signal that ends the job
  bool guardian_gone_ = false;
};

}  // namespace lockstep
