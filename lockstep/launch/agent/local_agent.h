#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/signals.h"
#include "lockstep/launch/agent/attempt.h"
#include "lockstep/launch/agent/job_report.h"
#include "lockstep/launch/agent/metrics_endpoint.h"
#include "lockstep/launch/agent/standby_pool.h"
#include "lockstep/launch/nodes/job_member.h"
#include "lockstep/launch/process/event_loop.h"
#include "lockstep/launch/process/output_mux.h"
#include "lockstep/launch/process/process_guardian.h"
#include "lockstep/launch/process/run_directory.h"
#include "lockstep/launch/process/store_port.h"
#include "lockstep/launch/watch/agent_socket.h"
#include "lockstep/worker/status_board.h"

namespace lockstep::internal {

struct LocalAgentOptions : AttemptOptions {
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
class LocalAgent : private Pollable {
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

  // Serves metrics (metrics_endpoint.h) while run() does its work.
  void serve_metrics(MetricsEndpoint endpoint);

  // Blocks until no worker, and nothing that a worker started, is left. Returns
  // the exit code of the launch: 0; or that of the first worker that failed in
  // the last attempt (128 + signal if a signal killed it); or 128 + signal if a
  // forwarded signal ended the job. If there are several nodes, it is the same
  // on all. Throws ProgramError, std::invalid_argument and std::system_error if
  // an attempt cannot be started; nothing is left then either. Sets in
  // `outcome`, which has what is known before, all but the exit code.
  int run(JobReport& outcome);

 private:
  // The agreements of the nodes for one attempt, from the wait for its plan to
  // its verdict, and what this node has to tell the others meanwhile.
  struct Round {
    int number = 0;
    std::optional<StorePort> port{};    // that is offered for rank 0's store
    std::optional<RoundPlan> plan{};    // of several nodes
    bool has_told_of_healing = false;   // report_healing()
    bool has_told_of_given_up = false;  // report_given_up()
    // Since when nodes wait for a snapshot, and when to look for one; nothing
    // if none waits.
    std::optional<int64_t> waits_since_ns{};
    Deadline look_for_snapshot_at = Deadline::after(std::chrono::seconds(0));
    std::vector<WorkerFailure> failures{};  // of this node
    // The last generation of this attempt that is known here.
    int generation = 0;
    // When a failure of this node is proposed as the verdict; nothing before
    // there is a failure and after it was proposed. An echo waits for its
    // cause, which may be on another node.
    std::optional<Deadline> propose_at{};
    // When to look whether a worker of this node was failing before the one on
    // another node that asks, and the ranks that are named by that one.
    std::optional<Deadline> look_for_causes_at{};
    NamedRanks named{};
    std::optional<Verdict> verdict{};
  };

  // Says how the job has ended to those who look at it.
  void publish_end();
  void await_departure();
  int run_rounds();
  // Returns nothing if the job ended before the attempt began.
  std::optional<RoundPlan> form_round();
  std::optional<RoundPlan> await_plan();
  void run_workers(const RoundPlan& plan);
  RoundPlan plan_alone(int round, int restarts_used,
                       const StorePort& port) const;
  // Starts the workers of an attempt.
  std::unique_ptr<Attempt> start_workers(const RoundPlan& plan,
                                         std::optional<StorePort> port);
  // After a failure, if standby processes can take all places of the next
  // attempt: gives them these at once, so that they make their group while the
  // workers of this attempt end.
  void prepare_next();
  // Starts the workers as `attempt_`. Returns false if they were to take the
  // places of a lost node and cannot; then this is the round's verdict.
  bool begin_attempt(const RoundPlan& plan);
  void tell_of_healing();
  void tell_of_given_up();
  void set_verdict_of_workers();
  void await_verdict();
  std::optional<int> end_round();
  // Returns the launcher's lines about a round that failed.
  std::string describe_failure();
  std::string describe_restart() const;

  bool ending() const { return ending_signal_ != 0 || guardian_gone_; }
  size_t running() const {
    return attempt_ ? attempt_->workers().running() : 0;
  }
  // Whether a failure of this node alone would be followed by a restart.
  bool has_restarts() const;
  // Both with what is known of this round.
  int restarts_used() const { return changes_.restarts + round_.generation; }
  int healings() const { return healings_ + round_.generation; }
  // After this round's verdict, events belong to the next round.
  bool hears_job() const { return job_ && (!round_.verdict || departing_); }
  void add_poll_entries(std::vector<pollfd>& entries) const override;
  std::optional<Deadline> due() const override;
  void handle_poll_entries(std::span<const pollfd> entries) override;
  void serve_guardian();
  void serve_job();
  void open_socket();
  AgentSocket::Answer answer(const std::string& question, pid_t asker);
  JobStatus status() const;
  std::string metrics();
  void offer_round();
  void propose_lost_launcher();
  void propose_lost(const LostNode& node);
  void obey_verdict();
  void forward(int signal);
  void forward_ending(int signal);
  void suspend_workers(bool suspended);
  void stop_by_signal(int signal, const std::string& text);
  void stop_after_failure();
  // After a failure of this node's workers. Returns false if it cannot be
  // healed, and the attempt must be stopped.
  bool heal();
  void end_what_was_left_by(const std::vector<HealedFailure>& failures);
  void look_for_snapshot();
  void look_for_causes();
  void propose_failure();
  // Returns whether nothing but echoes is known of this node's failures.
  bool only_echoes() const;
  bool may_be_echo() const;  // requires job_
  void end_leftovers();
  void set_ended(pid_t pid, int wait_status);
  void open_standby();
  // For a spare node that waits.
  void keep_standby();
  void end_standby();

  int node_rank() const { return joined_ ? joined_->membership.node_rank : -1; }
  std::string node_name() const;
  ChangeLimits limits() const;
  // Returns whether a signal makes this node leave a job that goes on.
  bool may_leave() const;
  Verdict failed_verdict(const std::vector<WorkerFailure>& failures) const;
  // Proposes it for this round, with what was healed.
  void propose(Verdict verdict);
  void end_job(Verdict verdict);

  LocalAgentOptions options_;
  const RunDirectory& directory_;
  EventLoop loop_{};
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
  int ending_signal_ = 0;  // the first forwarded signal that ends the job
  bool guardian_gone_ = false;
  bool suspended_ = false;  // by Ctrl-Z at the launcher
  bool leaves_ = false;     // at ending_signal_; the job goes on
  bool departing_ = false;  // in await_departure()

  // The nodes' agreement, once this node has joined the job.
  std::optional<Joined> joined_;

  // Before the current attempt.
  ChangeCount changes_{};
  int healings_ = 0;
  std::optional<NodePlace> place_{};  // of the last attempt that has begun
  Round round_;
  std::unique_ptr<Attempt> attempt_{};  // while it has workers
  // The next one, while the workers of this one end.
  std::unique_ptr<Attempt> next_{};
};

}  // namespace lockstep::internal
