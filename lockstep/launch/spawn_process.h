#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/spawn_report.h"

namespace lockstep {

// How a spawned process is started.
struct SpawnStart {
  int rank = 0;
  const std::vector<std::string>& arguments;    // argv, with argv[0]
  const std::vector<std::string>& environment;  // NAME=value
  int stdin_fd = -1;                            // must be above 2
  int master_listen_fd = -1;  // inherited, keeps its number; -1: none
  sigset_t signal_mask = {};  // the mask that it starts with
};

// One spawned process, held by the process that started it. It is held by a
// pidfd: this class never reaps or signals a process of other code, and code
// that waits for its own children does not reap this one (code that waits for
// any child does; see wait_status()). The destructor kills and reaps the
// process. Not synchronised.
class SpawnProcess {
 public:
  // Executes this program (/proc/self/exe) again. The kernel kills the process
  // when the *thread* that calls this ends. That thread must have all signals
  // blocked, so that no handler runs in the child while it shares this memory.
  // Throws std::system_error. Blocks for the time of an exec.
  static SpawnProcess start(const SpawnStart& start, SpawnReport report);

  SpawnProcess(SpawnProcess&& other) noexcept = default;
  SpawnProcess& operator=(SpawnProcess&&) = delete;
  // Kills the process. Blocks until the kernel has ended it, for at most 5 s.
  ~SpawnProcess();

  int rank() const { return rank_; }
  pid_t pid() const { return pid_; }
  // Readable once the process has ended; -1 after it was reaped.
  int pidfd() const { return pidfd_.get(); }
  bool ended() const { return !pidfd_; }
  void signal(int signal) const;  // does nothing after the end
  // Reaps the process if it has ended. Returns ended().
  bool reap();

  // Requires ended(). Returns the status in the form of waitpid(), or nothing
  // if other code of this process has taken it.
  std::optional<int> wait_status() const { return wait_status_; }
  const SpawnReport& report() const { return report_; }

  // Name of the environment variable that the spawn() call of a spawned process
  // reads.
  static constexpr const char* kVariable = "LOCKSTEP_SPAWN";

 private:
  SpawnProcess(int rank, pid_t pid, FileDescriptor pidfd, SpawnReport report)
      : rank_(rank),
        pid_(pid),
        pidfd_(std::move(pidfd)),
        report_(std::move(report)) {}

  int rank_;
  pid_t pid_;
  FileDescriptor pidfd_;
  SpawnReport report_;
  std::optional<int> wait_status_;
};

}  // namespace lockstep
