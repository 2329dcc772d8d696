#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/agent/standby_pool.h"
#include "lockstep/launch/nodes/round.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/launch/process/event_loop.h"
#include "lockstep/launch/process/output_mux.h"
#include "lockstep/launch/process/output_options.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/run_directory.h"
#include "lockstep/launch/watch/hang_finder.h"
#include "lockstep/launch/watch/job_status.h"
#include "lockstep/launch/watch/worker_failure.h"

namespace lockstep::internal {

// The options that all attempts of a launch share.
struct WorkerGroupOptions {
  Program program{};
  int nproc_per_node = 1;
  int max_restarts = 0;
  bool heals = false;    // --heal: worker/healing_place.h
  bool shrinks = false;  // --heal=shrink; only with `heals`
  std::string role = "default";
  std::string run_id{};
  std::string agent_socket{};  // AgentSocket::name(); empty if there is none
  // Whether the workers get a store from the launcher: they are not Python's.
  bool serves_store = false;
  std::string worker_store{};       // --worker-store; empty if it was not given
  std::string signals_to_handle{};  // for the workers' environment
  // One entry for each local rank, or none if the option is not given.
  std::vector<std::string> only_gpus{};  // --virtual-local-rank
  std::vector<std::set<int>> cpus{};     // --numa-binding
  std::vector<int> omp_threads{};        // --omp-threads
  bool tells_progress = false;  // workers get a progress file (hang_finder.h)
  OutputOptions output{};
};

// The workers of one node in one attempt, local ranks 0 to nproc_per_node - 1.
// Local rank 0 has the launcher's stdin, the others /dev/null: if several read
// one terminal, each would get some of its lines by chance. Reads what the
// workers say that may be called back: one that was, and stands by, is given to
// the StandbyPool and is not a worker of this group any more. If the job heals,
// a standby process can take the place of a worker that failed, or the place is
// given up and the ranks are numbered anew. For one thread.
class WorkerGroup {
 public:
  // Starts every worker. If one cannot be started, kills those that were
  // started, but does not reap them. `master_listen_fd` is StorePort::fd() if
  // this node has rank 0, otherwise -1. `store_socket` is the name of the
  // WorkerStoreService, or empty. Standby processes that wait
  // become workers, local rank 0 first; `standby` is null if the launch has
  // none. With it, no worker returns from init_process_group() before
  // let_leave(). `generation` is not 0 if the workers take the places of those
  // of a lost node; `places` are those of its generation (keep_places()). All
  // that is referred to must outlive the group. Throws ProgramError,
  // std::system_error.
  WorkerGroup(const WorkerGroupOptions& options, const RoundPlan& plan,
              int generation, std::vector<int> places, int master_listen_fd,
              const std::string& store_socket, const RunDirectory& directory,
              const Surroundings& surroundings, OutputMux& mux,
              StandbyPool* standby);

  // From now on workers return from init_process_group() when they have made
  // their group.
  void let_leave();
  // If no worker has been let out of init_process_group(), calls back those in
  // it that wait at the launcher's store: they get no SIGTERM, and stand by
  // again (handle_poll_entries()). Requires settle().
  void call_back();

  // As those of a Pollable.
  void add_poll_entries(std::vector<pollfd>& entries) const;
  void handle_poll_entries(std::span<const pollfd> entries);

  // Sends `signal` to the process group of every worker that has not ended. A
  // worker that hangs gets no SIGTERM, which could end it before SIGABRT does.
  void signal_process_groups(int signal) const;
  void kill_workers();  // SIGKILL to the workers themselves

  // Records the status from waitpid(); ignores children that are not workers of
  // this group.
  void set_ended(pid_t pid, int wait_status);

  size_t size() const { return workers_.size(); }
  // The ranks of all nodes, of which some may have been given up.
  int world_size() const { return place_.world_size; }
  size_t running() const;
  bool all_given_up() const;
  std::set<pid_t> pids() const;
  int stood_by() const { return stood_by_; }  // how many were standby processes
  std::vector<WorkerStatus> statuses() const;  // by local rank
  // Returns the processes of the workers that ended after settle().
  std::set<pid_t> stopped() const;
  // Returns the ranks of the workers that have not ended, as "rank 3" or "ranks
  // 0 and 3".
  std::string name_running() const;
  // Returns the workers that failed, the cause first (comes_before()): those
  // that ended badly before settle(), those whose error file says that they
  // were failing when they were stopped, and those that have ended in any way
  // and that echoes name. Reads error files.
  std::vector<WorkerFailure> failures() const;
  bool failed() const { return failed_; }
  // Returns the ranks, of any node, that the echoes of this group name.
  NamedRanks named_ranks() const;
  // Called if a worker of another node has failed as an echo, which names
  // `named`: this group has failed if one of them is here, or if the error file
  // of a worker that still runs says that it was the cause.
  void look_for_causes(const NamedRanks& named);
  // This group has failed, because these workers hang. Sends them SIGABRT, so
  // that they leave what their crash handler or a core dump tells.
  void end_hung(std::vector<HungWorker> hung);

  // The next eleven are for a job that heals, before settle().

  // Returns the last generation that a worker has told of; 0 if none has.
  int generation() const;

  // Returns whether all workers have said that their training can be healed,
  // also without what only other ranks have.
  bool all_heal_fully() const;
  // Returns whether a worker has ended with exit code 0 in the midst of its
  // training, and has not told the others.
  bool any_left_training();
  // Returns the local ranks of the workers that failed and are not replaced.
  std::vector<int> lost() const;
  // Returns why no process may take the places of lost() workers while the
  // others go on; nothing if that may be done.
  std::optional<std::string> why_not_healed();
  // Gives the place of a worker that failed and has ended to a standby process,
  // which joins `generation`. Returns the process; nothing if none takes it.
  std::optional<pid_t> replace(int local_rank, int generation);
  // Returns why the others cannot go on without the workers that failed, of
  // which why_not_healed() is empty; nothing if they can.
  std::optional<std::string> why_not_without() const;
  // Returns the place of a worker (worker/healing_place.h).
  int place_of(size_t local_rank) const {
    return plan_.place.first_rank + static_cast<int>(local_rank);
  }
  // The job is left with these places of all nodes; none means all. Numbers the
  // ranks anew. The workers of other places have ended, and are not those of
  // this group any more.
  void keep_places(std::vector<int> places);
  // Returns whether a process of replace() has not joined the others yet.
  bool any_joins() const;
  void kill_hung();  // SIGKILL to those of end_hung()

  // From now on the workers are being stopped: how they end does not count as a
  // failure.
  void settle() { settled_ = true; }
  // Lets the workers that still run, and that echoes of this group name, end by
  // themselves, as their exit codes say more than SIGTERM's: they get no
  // SIGTERM before end_spared(). Returns whether there are any.
  bool spare_named();
  void end_spared();

 private:
  struct Worker {
    // Where a worker of a launch with standby processes is, as it has said;
    // and whether it is a worker of another group, or of none, now.
    enum class Stage {
      before_group,
      meets,
      has_met,
      left,
      called_back,
      kept,
      given_up
    };

    ChildProcess process;
    std::filesystem::path error_file{};
    std::vector<std::string> environment{};
    std::string streams{};    // stream_marks()
    FileDescriptor socket{};  // empty if the launch has no standby processes
    Stage stage = Stage::before_group;
    bool heals = false;       // it, or one before it in its place, has said so
    std::string why_whole{};  // why it does not heal with fewer ranks
    bool joins = false;       // it took a place, and has not said so itself
    bool ended_training = false;  // likewise
    int generation = 0;           // the last one that it has told of
    int rank = 0;                 // in that generation
    bool is_spared = false;       // spare_named()
    bool was_stopped = false;     // it ended after settle() and was not spared
    std::optional<HungWorker> hung{};
    // The last lines that it has written through the launcher, to stdout and to
    // stderr.
    std::vector<std::shared_ptr<std::string>> last_lines{};
  };

  // Starts a worker, or has a standby process become it. Returns nothing only
  // if `only_standby` is set, and no standby process takes the place.
  std::optional<Worker> start_worker(int local_rank, int generation,
                                     bool only_standby);
  std::optional<Worker> start_process(const ChildStart& start,
                                      bool only_standby);
  std::filesystem::path progress_file(int local_rank) const;
  bool is_own(size_t local_rank) const;
  int rank_of(size_t local_rank) const { return workers_[local_rank].rank; }
  // Returns how many of the places that are left are before `place`.
  int rank_in_place(int place) const;
  void number_ranks();
  void hear_generation(Worker& worker, std::string_view told);
  // Returns false once the worker has no more to say.
  bool hear(Worker& worker);
  void hear_all(Worker& worker);

  const WorkerGroupOptions& options_;
  const RoundPlan& plan_;
  const int master_listen_fd_;
  const std::string& store_socket_;
  const RunDirectory& directory_;
  const Surroundings& surroundings_;
  OutputMux& mux_;
  StandbyPool* standby_;
  NodePlace place_;  // of the workers that are left
  std::vector<int> places_;
  const FileDescriptor no_input_;
  // The memory of each place, if the job heals; by local rank.
  std::vector<FileDescriptor> memory_{};
  std::vector<Worker> workers_{};
  NamedRanks named_elsewhere_{};  // by echoes of other nodes
  bool failed_ = false;
  bool settled_ = false;
  bool killed_ = false;
  bool may_leave_ = false;
  int stood_by_ = 0;
  std::chrono::system_clock::time_point hung_at_{};
  int64_t oom_kills_before_;
};

}  // namespace lockstep::internal
