#pragma once

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/agent/announcement.h"
#include "lockstep/launch/agent/standby_pool.h"
#include "lockstep/launch/agent/worker_group.h"
#include "lockstep/launch/agent/worker_store_service.h"
#include "lockstep/launch/nodes/round.h"
#include "lockstep/launch/process/event_loop.h"
#include "lockstep/launch/process/output_mux.h"
#include "lockstep/launch/process/run_directory.h"
#include "lockstep/launch/process/store_port.h"
#include "lockstep/launch/watch/hang_finder.h"
#include "lockstep/launch/watch/worker_failure.h"
#include "lockstep/worker/status_board.h"
#include "lockstep/worker/worker_store_link.h"

namespace lockstep::internal {

struct AttemptOptions {
  WorkerGroupOptions workers{};
  // After a signal from the user or the scheduler was forwarded: how long the
  // workers have until SIGKILL, for example for a last snapshot.
  std::chrono::milliseconds shutdown_timeout{30'000};
  // After a worker failed: how long the others have from SIGTERM to SIGKILL.
  // This is short, as they mostly wait for the worker that is gone.
  std::chrono::milliseconds failure_shutdown_timeout{500};
  // How long a worker may make no progress (hang_finder.h). None means for
  // ever.
  std::optional<std::chrono::milliseconds> hang_timeout{};
};

// The parts of an agent that its attempts share. They outlive them all.
struct AgentParts {
  const AttemptOptions& options;
  const RunDirectory& directory;
  const Surroundings& surroundings;
  OutputMux& mux;
  const std::function<void(const std::string& text)>& report;
  StatusBoard* board;    // null if nobody can look
  StandbyPool* standby;  // null if the launch has no standby processes
  bool is_alone;         // there are no other nodes
};

// The workers of one attempt on this node, what they meet at, how they are
// watched and how far their stopping has come. Each attempt is an object of its
// own, so nothing is left of the one before. It decides nothing: the agent
// tells it to stop, and why. For one thread.
class Attempt : public Pollable {
 public:
  // The workers of this node cannot take the places of those of a lost node.
  struct NotHealed : std::runtime_error {
    NotHealed(const std::string& why, int last_generation)
        : std::runtime_error(why), generation(last_generation) {}
    const int generation;  // of the attempt, as far as this node knows
  };

  // Starts the workers, which wait in init_process_group() until begin(): those
  // of the attempt before may still be ending. `port` is where rank 0 opens its
  // store, if this node has rank 0. If the plan has a lost node, announces
  // first that the workers take its places, which blocks for 5 s at most, or
  // throws NotHealed. Throws what WorkerGroup and WorkerStoreService throw, and
  // leaves workers to be reaped then.
  Attempt(const AgentParts& parts, const RoundPlan& plan,
          std::optional<StorePort> port);

  // The workers of the attempt before have ended: lets these leave
  // init_process_group() and begins to watch them.
  void begin();

  const RoundPlan& plan() const { return plan_; }
  WorkerGroup& workers() { return workers_; }
  const WorkerGroup& workers() const { return workers_; }
  // Workers have not ended, and there is still a way to end them; or all were
  // given up, and it is not stopping().
  bool goes_on() const;
  std::vector<WorkerStatus> statuses() const;
  // The number of OutputMux::streams() before the workers had any.
  size_t earlier_streams() const { return earlier_streams_; }
  // Returns whether `asker` may publish in the place of worker `local_rank`.
  bool claim(int local_rank, pid_t asker);

  // Holds the workers (SIGSTOP) or lets them go on (SIGCONT), unless they are
  // being stopped.
  void suspend(bool suspended);

  // The three ways to stop; each is for an attempt that is not stopping().
  // Forwards a signal that ends the job.
  void stop_by_signal(int signal);
  // The members of the job change. The program may save a last snapshot.
  void stop_for_members();
  // A worker here or elsewhere has failed. `calls_back`: workers in
  // init_process_group() are kept for the next attempt.
  void stop_after_failure(bool calls_back);
  // Sends SIGKILL at the next enforce_deadline(), however the attempt is being
  // stopped.
  void kill_now();
  // Sends SIGTERM to the workers that were to end by themselves
  // (WorkerGroup::spare_named()).
  void end_sparing();
  bool stopping() const { return stop_.has_value(); }
  bool stopped_by_signal() const { return stop_ && stop_->signal != 0; }

  // A node is gone, and the job goes on without its ranks, which heal()
  // announces.
  void give_up(LostNode node) { lost_nodes_.push_back(std::move(node)); }
  // Returns the first of them that is not announced yet; null if there is none.
  const LostNode* lost_node() const {
    return lost_nodes_.empty() ? nullptr : &lost_nodes_.front();
  }
  bool has_lost_ranks() const {
    return workers_.failed() || lost_node() != nullptr;
  }

  // For a job that heals (worker/healing_place.h), if has_lost_ranks() and
  // the attempt is not stopping(): has standby processes take the places of the
  // workers that failed, or waits for some to come, or gives the places up.
  // Must be called after each wait then, and after give_up().
  struct Healing {
    std::string cause{};                  // in one line
    std::vector<HealedFailure> healed{};  // now
    bool is_announced = false;            // now
    bool shrinks = false;                 // the places are given up
    // If this text is not empty, the failure cannot be healed, and the attempt
    // must be stopped.
    std::string why_not{};
    bool begins_to_wait = false;
  };
  Healing heal();
  // The number of the last generation that is known here, and of the last of
  // any node: this asks the workers' store, for kAnnounceAllowance at most.
  int generation() const {
    return std::max(generation_, workers_.generation());
  }
  int look_for_generations();

  // The workers' calls go over `line` from now on
  // (WorkerStoreService::renew()), to a store that does not have the keys of
  // earlier generations.
  void renew_line(std::shared_ptr<StoreLine> line) {
    generation_ = generation();
    if (store_) store_->renew(std::move(line));
  }

  // Must be called after each wait: ends workers that hang and refills the
  // standby pool, unless the attempt is being stopped.
  void watch();
  // Must be called after each wait, too: kills workers whose time is over.
  void enforce_deadline();

  void add_poll_entries(std::vector<pollfd>& entries) const override;
  // Returns when watch() or enforce_deadline() has something to do.
  std::optional<Deadline> due() const override;
  void handle_poll_entries(std::span<const pollfd> entries) override;

 private:
  // How far the stopping has come.
  struct Stop {
    int signal = 0;                       // the forwarded one, or 0 for SIGTERM
    std::chrono::milliseconds allowed{};  // until SIGKILL
    Deadline kill_at = Deadline::after(allowed);
    // When the workers that may end by themselves get SIGTERM.
    std::optional<Deadline> spared_until{};
    bool at_once = false;  // no time is allowed any more
    bool killed = false;
    bool given_up = false;
  };

  // How far the healing of a failure has come.
  struct Heal {
    Deadline until;  // when it is given up
    // Fewer standby processes than are needed have come in time: those that
    // wait are used; if none waits, the places are given up, if they may be.
    // `until` is later then, as the announcement has time of its own.
    bool is_late = false;
    // When workers that hang, and have not ended by SIGABRT, are killed.
    std::optional<Deadline> kill_hung_at{};
    std::optional<Deadline> announce_at{};  // again; nothing if now
    bool tells_of_wait = true;
    // The failures that are being announced, whether their places are given up,
    // and when the announcement is.
    std::vector<WorkerFailure> failures{};
    bool shrinks = false;
    size_t nodes = 0;  // it is about so many of lost_nodes_
    std::optional<Announcement> announcement{};
    std::optional<Deadline> answer_until{};
  };

  Healing heal_failures();
  Healing heal_lost_nodes();
  // Announces the next generation, in which the places `lost` are given up
  // (Heal::shrinks), or taken by standby processes once that is done.
  Healing announce(const std::string& cause, std::vector<int> lost);
  Healing await_answer();
  Healing announce_again(const WorkerStoreLost& error);
  Healing begin_generation();
  // Begins to serve the workers a store, if they get one.
  std::unique_ptr<WorkerStoreService> serve_store();
  // If the plan has a lost node, announces a generation in which the workers
  // take its places, after those that the workers' store lacks. Returns the
  // last generation.
  int take_lost_places();
  // Sets generation_ and places_ to those of the last one in the workers' store
  // that follows generation_; for kAnnounceAllowance at most.
  void read_generations();
  // Tells the workers of all nodes that one of this node has left its training,
  // so that they do not wait for it.
  void tell_of_ended_training();
  void begin_to_look_for_hangs();
  void look_for_hangs();
  // Starts what the pool lacks, once the attempt has begun: before that, its
  // workers need the cores.
  void refill_standby();

  const AgentParts parts_;
  const RoundPlan plan_;
  const size_t earlier_streams_;
  std::optional<StorePort> port_;
  std::string store_socket_{};  // WorkerStoreService::name_for(), or empty
  std::unique_ptr<WorkerStoreService> store_;
  // The places that are left in the last generation whose notice was read here,
  // if some were given up; and its number.
  std::vector<int> places_{};
  int generation_;
  WorkerGroup workers_;
  // The processes that publish on the board, by local rank; 0 if there is
  // none yet.
  std::vector<pid_t> publishers_;
  bool has_begun_ = false;
  bool suspended_ = false;
  std::optional<HangFinder> hangs_{};  // if there is a hang_timeout
  bool all_publish_ = false;
  bool awaits_joins_ = false;            // a healing has not ended
  FileDescriptor ended_training_{};      // the connection that tells of it
  std::optional<Deadline> refill_at_{};  // nothing if it may be done now
  std::optional<Stop> stop_{};
  std::optional<Heal> heal_{};  // while workers that failed are not replaced
  std::vector<LostNode> lost_nodes_{};  // of give_up()
};

}  // namespace lockstep::internal
