#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// The settings that a launcher changes for itself, as it found them. Its
// children get these values back.
struct Surroundings {
  sigset_t signal_mask = {};
  std::optional<rlimit> descriptors{};  // RLIMIT_NOFILE, if it was changed
};

// The session in which a program is executed.
enum class ChildSession {
  // The parent's, so that a terminal's Ctrl-C reaches the child, too. Signals
  // that the parent ignores stay ignored, as over any exec.
  inherited,
  // The child leads a session and process group of its own, so that a
  // terminal's Ctrl-C reaches only the parent, which forwards it once. Signals
  // have their default actions; but an ignored SIGHUP stays ignored, as nohup
  // wants.
  own,
};

// How a program is executed in a child.
struct ChildStart {
  std::string what;  // begins the texts of errors: "starting a worker process"
  std::string path;  // for execve: it has a slash
  const std::vector<std::string>& arguments;    // argv, with argv[0]
  const std::vector<std::string>& environment;  // NAME=value
  // They become the child's descriptors 0, 1 and 2. Each must be above 2 or
  // equal to its target.
  int stdin_fd = 0;
  int stdout_fd = 1;
  int stderr_fd = 2;
  // The only other descriptors that the child inherits, under the same numbers;
  // -1 if there is none. All others are closed, also those that this process
  // inherited (as Python's subprocess does, and so torchrun); but kernels
  // before 5.11 keep those open that are not close-on-exec.
  std::vector<int> inherited_fds{};
  ChildSession session = ChildSession::own;
  // Those that it may run on; empty means as this process.
  std::set<int> cpus{};
  Surroundings surroundings{};
};

// Thrown if the kernel refuses to execute the program of a child; code() is its
// errno.
class ExecError : public std::system_error {
 public:
  using std::system_error::system_error;
};

// One direct child of this process: a program, or a function of this one.
//
// The owner reaps it, in one of two ways. reap() reaps this child alone, beside
// other code that waits for its own children. An owner that reaps any child
// with waitpid() passes the status to set_ended(). The number of a child that
// nobody has reaped is given to no other process; so signals cannot go astray,
// and are sent to nobody once ended() is true.
//
// Not synchronised.
class ChildProcess {
 public:
  // Executes a program, and returns once it is executing. The kernel kills it
  // when the *thread* that calls this ends (PR_SET_PDEATHSIG). All signals are
  // blocked in this thread meanwhile. Blocks for the time of an exec. Throws
  // ExecError if the kernel refuses the program, another std::system_error if
  // no process is available.
  static ChildProcess start(const ChildStart& start);
  // Forks this process. If it has several threads, `body` must take no lock but
  // those of malloc(). The child ends with the result of `body`, which must not
  // throw, as its exit code, without running destructors. The kernel lets it
  // live on when this process ends. Throws std::system_error, whose text begins
  // with `what`.
  static ChildProcess fork(const std::string& what,
                           const std::function<int()>& body);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  // Sends SIGKILL if it has not ended, to its process group if it was started
  // with a session of its own. Reaps nothing.
  ~ChildProcess();

  // lifetime() is counted from here on.
  void begin_lifetime() { started_ = Clock::now(); }

  pid_t pid() const { return pid_; }
  // Readable once the child has ended. -1 after reap() has returned true, and
  // always if the kernel or a sandbox has no pidfds.
  int pidfd() const { return pidfd_.get(); }
  // Whether it has ended and was reaped.
  bool ended() const { return ended_; }
  // Sends `signal` to this process alone. Does nothing after its end.
  void signal(int signal) const;
  // Sends it to its first thread, the one of main(), which then handles it.
  // Does nothing after its end.
  void signal_main_thread(int signal) const;
  // Sends `signal` to its process group, which it leads (ChildSession::own).
  // Does nothing after its end.
  void signal_group(int signal) const;

  // Reaps the child if it has ended. Returns ended().
  bool reap();
  // Says that the owner has reaped the child, with the status from waitpid().
  void set_ended(int wait_status);

  // The following require ended(). wait_status() is in the form of waitpid(),
  // or nothing if other code of this process has taken it.
  std::optional<int> wait_status() const { return wait_status_; }
  // Both require a wait_status(); exit_code() is 128 + signal if a signal ended
  // the child.
  int exit_code() const;
  std::optional<int> ending_signal() const;
  std::chrono::milliseconds lifetime() const;
  std::chrono::system_clock::time_point ended_at() const { return ended_at_; }

 private:
  using Clock = std::chrono::steady_clock;

  ChildProcess(pid_t pid, FileDescriptor pidfd, bool leads_group)
      : pid_(pid),
        pidfd_(std::move(pidfd)),
        leads_group_(leads_group),
        started_(Clock::now()) {}
  void note_end(std::optional<int> wait_status);

  pid_t pid_;
  FileDescriptor pidfd_;
  bool leads_group_;
  bool ended_ = false;
  Clock::time_point started_;
  Clock::time_point ended_steadily_{};
  std::chrono::system_clock::time_point ended_at_{};
  std::optional<int> wait_status_;
};

// Returns the mask for sched_setaffinity() that holds `cpus`.
std::vector<unsigned long> affinity_mask(const std::set<int>& cpus);

// Returns `fd`, or a copy of it with a number above 2, because a child's
// standard streams take the numbers up to 2. The copy is close-on-exec. Throws
// std::system_error.
FileDescriptor above_standard_streams(FileDescriptor fd);

}  // namespace lockstep::internal
