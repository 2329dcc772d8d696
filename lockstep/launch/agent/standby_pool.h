#pragma once

#include <sys/types.h>

#include <functional>
#include <list>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/launch/process/event_loop.h"

namespace lockstep::internal {

struct StandbyPoolOptions {
  int processes = 0;  // as many wait
  std::string path{};
  std::vector<std::string> arguments{};
  // The result of standby_environment(): without LOCKSTEP_STANDBY.
  std::vector<std::string> environment{};
  Surroundings surroundings{};
};

// The standby processes of one node: they run the workers' program up to
// init_process_group() and wait there (worker/standby_place.h), so that a
// restart need not load the program, its libraries and what else comes before
// that call.
//
// They are started one after another, since each takes a core until it waits. A
// process that ends before it has a place is replaced after 1 s, after 2 s the
// next time, and so on up to 60 s; the first such end is reported. If the
// program asks for its rank too early, or ends well without a group, that is
// reported and no more are started.
//
// A worker that was in init_process_group() when its attempt ended can stand by
// for the place that it had (keep()), beside these.
//
// The owner reaps the processes and passes the status to set_ended(). For one
// thread.
class StandbyPool : public Pollable {
 public:
  // Called with text for the user.
  using Report = std::function<void(const std::string& text)>;

  StandbyPool(StandbyPoolOptions options, Report report);

  // Starts a process if one is missing, none is on its way to
  // init_process_group(), and the time after an early end is over. If the
  // system refuses one, that counts as an early end.
  void refill();
  // When refill() can start one, if that depends on time alone. (If one is on
  // its way, its message comes first.)
  std::optional<Deadline> next_start() const {
    return lacks_one() ? not_before_ : std::nullopt;
  }

  struct Taken {
    ChildProcess process;
    FileDescriptor socket;
  };
  // Gives a process that waits the place that `worker` describes, as if the
  // worker had been started so: the one that keep() has for this place, or one
  // that had none. Its inherited_fds are StorePort::fd() and the memory of the
  // place, or -1. Returns nothing if none waits, or if it would be another
  // program. The process's lifetime() begins here.
  std::optional<Taken> take(const ChildStart& worker);

  // Keeps a worker that was called back, and stands by again, for the place
  // that it had: its program may have read its rank. `environment` is the one
  // that it had as a worker.
  void keep(ChildProcess process, FileDescriptor socket,
            const std::vector<std::string>& environment);
  // Ends those that are kept and were not taken.
  void end_kept();

  // Returns whether `pid` was a standby process without a place.
  bool set_ended(pid_t pid, int wait_status);

  void add_poll_entries(std::vector<pollfd>& entries) const override;
  void handle_poll_entries(std::span<const pollfd> entries) override;

  // How many wait once all have come; 0 if no more are started.
  int processes() const { return given_up_ ? 0 : options_.processes; }
  // Both count those in init_process_group().
  int waiting() const;  // without those that are kept
  int kept() const;
  std::set<pid_t> pids() const;

 private:
  struct Member {
    ChildProcess process;
    FileDescriptor socket;  // empty once the process has hung up
    FileDescriptor out;     // early_output_file()
    FileDescriptor err;
    bool waits = false;
    // The variables that must be those of the next place, if it is kept.
    std::vector<std::string> place{};
  };

  // Whether refill() may start one, apart from the time.
  bool lacks_one() const;
  void start();
  void hear(Member& member);
  void note_early_end(const std::string& words);
  void give_up(const std::string& reason);

  StandbyPoolOptions options_;
  Report report_;
  std::list<Member> members_;
  int early_ends_ = 0;  // since one was given a place
  bool has_reported_ = false;
  bool given_up_ = false;
  std::optional<Deadline> not_before_{};
};

// The two ends of the connection between an agent and a process that stands by
// or can be called back (worker/standby_place.h).
struct StandbySockets {
  FileDescriptor own;
  FileDescriptor theirs;  // above_standard_streams()
};
// Throws std::system_error, whose text begins with `what`.
StandbySockets standby_sockets(const std::string& what);

// Throws std::invalid_argument, which says why, unless `program` can stand by:
// it must be an executable that is linked with Lockstep's init_process_group(),
// and its arguments must be the same for all local ranks.
void require_standby_program(const std::string& path,
                             const std::vector<std::string>& arguments);

}  // namespace lockstep::internal
