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

// What the launcher changes for itself, as it found it: workers get it back.
struct Surroundings {
  sigset_t signal_mask = {};
  std::optional<rlimit> descriptors{};  // RLIMIT_NOFILE, if it was changed
};

// How one worker is started.
struct WorkerStart {
  const Program& program;
  const std::vector<std::string>& environment;
  // Become the worker's 0, 1 and 2; above 2 or equal to their target.
  int stdin_fd = 0;
  int stdout_fd = 1;
  int stderr_fd = 2;
  // The one descriptor beyond these that survives, under its number. All others
  // are closed, those too that the launcher inherited (as Python's subprocess
  // does, and so torchrun); kernels before 5.11 keep the latter open.
  int inherited_fd = -1;
  Surroundings surroundings{};
};

// One worker: a direct child, leader of its own session and process group (so
// that a terminal's Ctrl-C reaches the launcher only, which forwards it, once),
// killed by the kernel when its parent dies (PR_SET_PDEATHSIG).
//
// The owner reaps: it calls set_ended() with what waitpid() gave it. Not
// thread-safe: the worker's life hangs on the thread that started it.
class WorkerProcess {
 public:
  // Starts the program and returns once it is executing. Throws ProgramError
  // where the kernel refuses it, std::system_error where there is no process
  // to be had. Blocks for the time of an exec.
  static WorkerProcess start(const WorkerStart& start);

  WorkerProcess(WorkerProcess&& other) noexcept;
  WorkerProcess& operator=(WorkerProcess&&) = delete;
  ~WorkerProcess();  // SIGKILL to the process group if it has not ended

  pid_t pid() const { return pid_; }
  bool ended() const { return wait_status_.has_value(); }
  // Sends `signal` to the process group; nothing once ended, as the number may
  // then belong to somebody else.
  void signal_group(int signal) const;
  // Sends `signal` to this process alone; nothing once ended.
  void signal_process(int signal) const;

  void set_ended(int wait_status);
  // Requires ended().
  int exit_code() const;  // 128 + signal where a signal ended it
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

// The shell's number for what waitpid() returned.
int exit_code_of(int wait_status);

// "SIGTERM"; "signal 42" where it has no name.
std::string signal_name(int signal);

}  // namespace lockstep
