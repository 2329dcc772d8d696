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
  int stdin_fd = -1;                            // above 2
  int master_listen_fd = -1;  // inherited under its number; -1: none
  sigset_t signal_mask = {};  // the mask that it starts with
};

// One spawned process as its starter holds it, by pidfd: whatever else this
// process waits for or signals, neither takes the other's. Killed and reaped at
// the end of its life. Not synchronised.
class SpawnProcess {
 public:
  // Executes this program (/proc/self/exe) again. The process dies with the
  // *thread* that calls this; call it with all signals blocked, so that no
  // handler runs in the child while it shares this memory. Throws
  // std::system_error. Blocks for the time of an exec.
  static SpawnProcess start(const SpawnStart& start, SpawnReport report);

  SpawnProcess(SpawnProcess&& other) noexcept = default;
  SpawnProcess& operator=(SpawnProcess&&) = delete;
  // Blocks until the kernel has ended it, 5 s at most.
  ~SpawnProcess();

  int rank() const { return rank_; }
  pid_t pid() const { return pid_; }
  // Readable once it has ended; -1 after it was reaped.
  int pidfd() const { return pidfd_.get(); }
  bool ended() const { return !pidfd_; }
  void signal(int signal) const;  // nothing once ended
  // Reaps it if it has ended; returns ended().
  bool reap();

  // Requires ended(). As waitpid() has it; nothing where other code of this
  // process took it.
  std::optional<int> wait_status() const { return wait_status_; }
  const SpawnReport& report() const { return report_; }

  // Environment variable of a spawned process, read by its spawn() call.
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
