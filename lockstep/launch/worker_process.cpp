#include "lockstep/launch/worker_process.h"

#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/exec_pointers.h"

namespace lockstep {
namespace {

// Everything that the child needs, prepared before vfork().
struct ChildPlan {
  const char* path;
  char* const* arguments;
  char* const* environment;
  int standard_fds[3];
  int inherited_fd;
  const Surroundings* surroundings;
  pid_t parent;
};

// Runs in the child of vfork(), in the parent's memory while the parent is
// suspended. So it makes only system calls: nothing here may allocate or lock.
// Descriptors and signal dispositions are already the child's own. Returns
// errno.
int execute(const ChildPlan& plan) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  // If the parent died before the line above, nothing would ever kill this
  // process.
  if (getppid() != plan.parent) _exit(128 + SIGKILL);
  if (setsid() < 0) return errno;

  struct sigaction by_default {};
  by_default.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) {
    // An ignored SIGHUP stays ignored, as nohup wants.
    if (signal != SIGHUP) sigaction(signal, &by_default, nullptr);
  }
  for (int target = 0; target < 3; ++target) {
    const int source = plan.standard_fds[target];
    if (source != target && dup2(source, target) < 0) return errno;
  }
  syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 1U << 2);  // CLOEXEC
  if (plan.inherited_fd >= 0 && fcntl(plan.inherited_fd, F_SETFD, 0) != 0) {
    return errno;
  }
  const auto& descriptors = plan.surroundings->descriptors;
  if (descriptors) setrlimit(RLIMIT_NOFILE, &*descriptors);
  sigprocmask(SIG_SETMASK, &plan.surroundings->signal_mask, nullptr);
  execve(plan.path, plan.arguments, plan.environment);
  return errno;
}

// This is a function of its own and never inlined, so that no variable of the
// caller lives across vfork()'s second return.
[[gnu::noinline]] pid_t spawn(const ChildPlan& plan, volatile int& error) {
  // posix_spawn() could not ask for a signal at the parent's death.
  const pid_t pid = vfork();  // NOLINT(bugprone-unsafe-functions)
  if (pid == 0) {
    error = execute(plan);
    _exit(127);
  }
  return pid;
}

[[noreturn]] void refuse(const std::string& path, int error) {
  if (error == ENOEXEC) {
    throw ProgramError(126, "program " + path +
                                " is not in a format that this host executes; "
                                "a script begins with #! and its interpreter");
  }
  if (error == ENOENT) {
    throw ProgramError(127, "program " + path +
                                ": it, or the interpreter that it names, does "
                                "not exist");
  }
  throw ProgramError(126, "program " + path + ": " + strerror(error));
}

}  // namespace

WorkerProcess WorkerProcess::start(const WorkerStart& start) {
  const std::vector<char*> arguments = exec_pointers(start.program.arguments);
  const std::vector<char*> environment = exec_pointers(start.environment);
  const ChildPlan plan{start.program.path.c_str(),
                       arguments.data(),
                       environment.data(),
                       {start.stdin_fd, start.stdout_fd, start.stderr_fd},
                       start.inherited_fd,
                       &start.surroundings,
                       getpid()};
  volatile int error = 0;
  const pid_t pid = spawn(plan, error);
  if (pid < 0) throw_errno("starting a worker process");
  if (error != 0) {
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    refuse(start.program.path, error);
  }
  return WorkerProcess(pid);
}

WorkerProcess::WorkerProcess(WorkerProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      started_(other.started_),
      ended_(other.ended_),
      ended_at_(other.ended_at_),
      wait_status_(other.wait_status_) {}

WorkerProcess::~WorkerProcess() { signal_group(SIGKILL); }

void WorkerProcess::signal_group(int signal) const {
  if (pid_ > 0 && !ended()) ::kill(-pid_, signal);
}

void WorkerProcess::signal_process(int signal) const {
  if (pid_ > 0 && !ended()) ::kill(pid_, signal);
}

void WorkerProcess::set_ended(int wait_status) {
  wait_status_ = wait_status;
  ended_ = now();
  ended_at_ = std::chrono::system_clock::now();
}

int WorkerProcess::exit_code() const { return exit_code_of(*wait_status_); }

std::optional<int> WorkerProcess::ending_signal() const {
  if (!WIFSIGNALED(*wait_status_)) return std::nullopt;
  return WTERMSIG(*wait_status_);
}

std::chrono::milliseconds WorkerProcess::now() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      Clock::now().time_since_epoch());
}

int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status)
                                  : WEXITSTATUS(wait_status);
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name
                         : "signal " + std::to_string(signal);
}

}  // namespace lockstep
