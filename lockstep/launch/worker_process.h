#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/program.h"

namespace lockstep {

// What the launcher changes for itself, as it found it. Workers get these
// values back.
struct Surroundings {
  sigset_t signal_mask = {};
  std::optional<rlimit> descriptors{};  // RLIMIT_NOFILE, if it was changed
};

// How one worker is started.
struct WorkerStart {
  const Program& program;
  const std::vector<std::string>& environment;
  // They become the worker's descriptors 0, 1 and 2. Each must be above 2 or
  // equal to its target.
  int stdin_fd = 0;
  int stdout_fd = 1;
  int stderr_fd = 2;
  // The only other descriptor that the worker inherits, under the same number;
  // -1: none. All others are closed, also those that the launcher inherited (as
  // Python's subprocess does, and so torchrun); but kernels before 5.11 keep
  // the latter open.
  int inherited_fd = -1;
  Surroundings surroundings{};
};

// One worker: a direct child that leads a session and process group of its own,
// so that a terminal's Ctrl-C reaches only the launcher, which forwards it
// once. The kernel kills the worker when its parent dies (PR_SET_PDEATHSIG).
//
// The owner reaps the worker and passes the status from waitpid() to
// set_ended(). Not thread-safe: the kernel kills the worker when the thread
// that started it ends.
class WorkerProcess {
 public:
  // Starts the program and returns once it is executing. Throws ProgramError if
  // the kernel refuses it, std::system_error if no process is available. Blocks
  // for the time of an exec.
  static WorkerProcess start(const WorkerStart& start);

  WorkerProcess(WorkerProcess&& other) noexcept;
  WorkerProcess& operator=(WorkerProcess&&) = delete;
  ~WorkerProcess();  // SIGKILL to the process group if it has not ended

  pid_t pid() const { return pid_; }
  bool ended() const { return wait_status_.has_value(); }
  // Sends `signal` to the process group. Does nothing after the worker has
  // ended, as the number may then belong to another process.
  void signal_group(int signal) const;
  // Sends `signal` to this process alone. Does nothing after it has ended.
  void signal_process(int signal) const;

  void set_ended(int wait_status);
  // Requires ended().
  int exit_code() const;  // 128 + signal if a signal ended it
  std::optional<int> ending_signal() const;
  std::chrono::milliseconds lifetime() const { return ended_ - started_; }
  std::chrono::system_clock::time_point ended_at() const { return ended_at_; }

 private:
  using Clock = std::chrono::steady_clock;

  explicit WorkerProcess(pid_t pid) : pid_(pid), started_(now()) {}
  static std::chrono::milliseconds now();

  pid_t pid_;
  std::chrono::milliseconds started_;
  std::chrono::milliseconds ended_{};
  std::chrono::system_clock::time_point ended_at_{};
  std::optional<int> wait_status_;
};

// Returns a shell's exit code for a status from waitpid().
int exit_code_of(int wait_status);

// Returns "SIGTERM", or "signal 42" if the signal has no name.
std::string signal_name(int signal);

}  // namespace lockstep
