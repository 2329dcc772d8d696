#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/signal_list.h"
#include "lockstep/launch/agent/job_report.h"
#include "lockstep/launch/agent/metrics_endpoint.h"
#include "lockstep/launch/agent/standby_pool.h"
#include "lockstep/launch/agent/worker_group.h"
#include "lockstep/launch/agent/worker_store_service.h"
#include "lockstep/launch/nodes/job_member.h"
#include "lockstep/launch/process/output_mux.h"
#include "lockstep/launch/process/process_guardian.h"
#include "lockstep/launch/process/run_directory.h"
#include "lockstep/launch/process/store_port.h"
#include "lockstep/launch/watch/agent_socket.h"
#include "lockstep/launch/watch/hang_finder.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {

struct LocalAgentOptions {
  WorkerGroupOptions workers{};
  // Address and port of rank 0's store, if there is one node; `master_addr` is
  // what the workers are told, and `store_addr` the same in numbers.
  std::string master_addr = "127.0.0.1";
  std::string store_addr = "127.0.0.1";
  int master_port = 0;  // 0 for a free one, another in every attempt
  // The name of this host, for messages of a job of several nodes.
  std::string host_name{};
  // The signals that are forwarded once and end the job. SIGUSR1 and SIGUSR2,
  // unless they are among them, are forwarded each time and end nothing.
  std::set<int> ending_signals = kEndingSignals;
  // After a signal from the user or the scheduler was forwarded: how long the
  // workers have until SIGKILL, for example for a last snapshot.
  std::chrono::milliseconds shutdown_timeout{30'000};
  // After a worker failed: how long the others have from SIGTERM to SIGKILL.
  // This is short, as they mostly wait for the worker that is gone.
  std::chrono::milliseconds failure_shutdown_timeout{500};
  // How long a worker may make no progress (hang_finder.h). None means for
  // ever.
  std::optional<std::chrono::milliseconds> hang_timeout{};
  // How many standby processes wait on this node (standby_pool.h).
  int standby = 0;
  // How long processes that workers leave have from SIGTERM to SIGKILL.
  std::chrono::milliseconds leftover_timeout{200};

  // How long an agent that ends at a signal may take: after the workers' time
  // it ends leftovers, its output and its membership of the job.
  std::chrono::milliseconds ending_allowance() const {
    return std::max(shutdown_timeout, 2 * failure_shutdown_timeout) +
           leftover_timeout + std::chrono::seconds(30);
  }
};

// The elastic agent of one node: starts the workers, watches them, stops all
// when one fails, starts them again while restarts are left, and forwards
// signals. In a job of several nodes it does so in step with the agents of the
// other nodes. Follows torchrun's LocalElasticAgent, but is driven by events:
// it sleeps until a child ends, output comes, the guardian writes or the job
// has news. For one thread. Requires all signals blocked, as in run_guarded().
class LocalAgent {
 public:
  // Called with text for the user, without a name before it or a newline after
  // it. Never called in the middle of a worker's line of up to PIPE_BUF bytes
  // that the mux carries.
  using Report = std::function<void(const std::string& text)>;

  // `first_port` is for the first attempt; if it is nothing, a port is taken
  // when it is needed. `job` is null if there is one node.
  LocalAgent(LocalAgentOptions options, const RunDirectory& directory,
             std::optional<StorePort> first_port, GuardianLink link,
             Report report, std::unique_ptr<JobMember> job = nullptr);

  // Serves metrics (metrics_text.h) while run() does its work.
  void serve_metrics(MetricsEndpoint endpoint) {
    metrics_.emplace(std::move(endpoint));
  }

  // Blocks until no worker, and nothing that a worker started, is left. Returns
  // the exit code of the launch: 0; or that of the first worker that failed in
  // the last attempt (128 + signal if a signal killed it); or 128 + signal if a
  // forwarded signal ended the job. If there are several nodes, it is the same
  // on all. Throws ProgramError, std::invalid_argument and std::system_error if
  // an attempt cannot be started; nothing is left then either. Sets in
  // `outcome`, which has what is known before, all but the exit code.
  int run(JobReport& outcome);

 private:
  // Why an attempt is being stopped, and how far that has come.
  struct Stop {
    int signal = 0;  // the forwarded one; 0 after a failure
    std::chrono::milliseconds allowed{};  // until SIGKILL
    bool at_once = false;                 // no time is allowed any more
    // When the workers that may end by themselves get SIGTERM
    // (WorkerGroup::spare_named()).
    std::optional<Deadline> spared_until{};
    std::optional<Deadline> kill_at{};
    bool killed = false;
    bool given_up = false;
  };

  // Says how the job has ended to those who look at it.
  void publish_end();
  void await_departure();
  int run_rounds();
  // Returns nothing if the job ended before the attempt began.
  std::optional<RoundPlan> form_round();
  std::optional<RoundPlan> await_plan();
  void run_workers(const RoundPlan& plan);
  // The workers of one attempt, and what they meet at.
  struct Attempt {
    RoundPlan plan{};
    std::optional<StorePort> port{};
    std::unique_ptr<WorkerStoreService> store{};
    std::optional<WorkerGroup> group{};
    size_t earlier_streams = 0;  // of the mux
  };

  RoundPlan plan_alone(int round, int restarts_used,
                       const StorePort& port) const;
  // Starts the workers of an attempt.
  void start_workers(Attempt& attempt);
  // After a failure, if standby processes can take all places of the next
  // attempt: gives them these at once, so that they make their group while the
  // workers of this attempt end.
  void prepare_next();
  // Begins to serve the workers of an attempt a store, if they get one.
  std::unique_ptr<WorkerStoreService> serve_store(const RoundPlan& plan);
  void set_verdict_of_workers();
  void await_verdict();
  std::optional<int> end_round();
  // Returns the launcher's lines about a round that failed.
  std::string describe_failure();
  std::string describe_restart() const;

  bool ending() const { return ending_signal_ != 0 || guardian_gone_; }
  size_t running() const { return group_ ? group_->running() : 0; }
  // Whether a failure of this node alone would be followed by a restart.
  bool has_restarts() const;
  void wait_for_event();
  void serve_guardian();
  void serve_job();
  void open_socket();
  AgentSocket::Answer answer(const std::string& question, pid_t asker);
  JobStatus status() const;
  std::string metrics();
  // Returns whether `asker` may publish in the place of worker `local_rank`.
  bool claim(int local_rank, pid_t asker);
  void offer_round();
  void propose_lost_launcher();
  void obey_verdict();
  void forward(int signal);
  void forward_ending(int signal);
  void suspend_workers(bool suspended);
  void stop_by_signal(int signal, const std::string& text);
  void stop_after_failure();
  void stop_for_members();
  void kill_now();
  void end_sparing();
  void enforce_deadline();
  void look_for_hangs();
  void look_for_snapshot();
  void look_for_causes();
  void propose_failure();
  // Returns whether nothing but echoes is known of this node's failures.
  bool only_echoes() const;
  bool may_be_echo() const;  // requires job_
  void end_leftovers();
  void set_ended(pid_t pid, int wait_status);
  void open_standby();
  // Starts what the pool lacks, once the attempt has begun: before that, its
  // workers need the cores.
  void refill_standby();
  void end_standby();

  int node_rank() const { return joined_ ? joined_->membership.node_rank : -1; }
  std::string node_name() const;
  ChangeLimits limits() const;
  // Returns whether a signal makes this node leave a job that goes on.
  bool may_leave() const;
  Verdict failed_verdict(const std::vector<WorkerFailure>& failures) const;
  void end_job(Verdict verdict);

  LocalAgentOptions options_;
  const RunDirectory& directory_;
  std::optional<StorePort> port_;
  GuardianLink link_;
  Report report_;
  FileDescriptor child_events_;  // signalfd of SIGCHLD
  OutputMux mux_;
  std::unique_ptr<JobMember> job_;
  const int64_t started_ns_;
  JobReport* outcome_ = nullptr;  // while run() runs
  // Both are nothing if the system refused them: then nobody can look.
  std::optional<AgentSocket> socket_{};
  std::optional<StatusBoard> board_{};
  std::optional<MetricsEndpoint> metrics_{};
  std::optional<StandbyPool> standby_{};  // from the first attempt on
  std::vector<pollfd> entries_;
  int ending_signal_ = 0;  // the first forwarded signal that ends the job
  bool guardian_gone_ = false;
  bool suspended_ = false;  // by Ctrl-Z at the launcher
  bool leaves_ = false;     // at ending_signal_; the job goes on
  bool departing_ = false;  // in await_departure()

  // The nodes' agreement, once this node has joined the job.
  std::optional<Joined> joined_;

  // Before the current attempt.
  ChangeCount changes_{};

  // The members below belong to the current attempt.
  int round_ = 0;
  // Since when nodes wait for a snapshot, and when to look for one; nothing:
  // none waits.
  std::optional<int64_t> waits_since_ns_{};
  Deadline look_for_snapshot_at_ = Deadline::after(std::chrono::seconds(0));
  std::optional<RoundPlan> plan_;
  std::optional<NodePlace> place_{};
  std::unique_ptr<WorkerStoreService> worker_store_{};
  std::optional<WorkerGroup> group_;
  // The next one, while the workers of this one end.
  std::optional<Attempt> next_{};
  std::optional<HangFinder> hangs_{};  // if there is a hang_timeout
  // The processes that publish on the board, by local rank; 0 if there is none
  // yet.
  std::vector<pid_t> publishers_{};
  std::optional<Deadline> refill_at_{};  // nothing: it may be done now
  bool all_publish_ = false;
  Stop stop_;
  std::vector<WorkerFailure> failures_;  // of this node
  // When a failure of this node is proposed as the job's verdict; nothing
  // before there is a failure and after it was proposed. An echo waits for its
  // cause, which may be on another node.
  std::optional<Deadline> propose_at_;
  // When to look whether a worker of this node was failing before the one on
  // another node that asks.
  std::optional<Deadline> look_for_causes_at_{};
  NamedRanks named_{};  // by that one
  std::optional<Verdict> verdict_;
};

}  // namespace lockstep::internal
