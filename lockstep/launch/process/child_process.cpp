#include "lockstep/launch/process/child_process.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <utility>

#include "lockstep/base/signals.h"
#include "lockstep/launch/process/exit_code.h"

namespace lockstep::internal {
namespace {

// Returns argv or envp for execve(): pointers into `strings`, which must
// outlive them, and a null at the end.
std::vector<char*> exec_pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const auto& text : strings) {
    result.push_back(const_cast<char*>(text.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

constexpr int kFailedToExecute = 127;
constexpr size_t kStackBytes = 64 * 1024;

// Sharing memory saves copying the page tables of a large process. But
// ThreadSanitizer treats every child of clone() as a child of fork(): it stops
// checking the child, and if the memory is shared, this process too, for good.
#ifdef __SANITIZE_THREAD__
constexpr int kMemory = 0;
#else
constexpr int kMemory = CLONE_VM;
#endif

// P_PIDFD, which glibc defines only since 2.36.
constexpr auto kByPidfd = static_cast<idtype_t>(3);

// Everything that the child needs, prepared before clone().
struct ChildPlan {
  const char* path;
  char* const* arguments;
  char* const* environment;
  std::array<int, 3> standard_fds;
  const std::vector<int>* inherited_fds;
  ChildSession session;
  // A mask; empty if it is not to be set.
  const std::vector<unsigned long>* cpus;
  const Surroundings* surroundings;
  pid_t parent;
  int error_pipe;  // takes errno if the child cannot execute
};

// Removes signal handlers: they would run in the parent's memory once signals
// are unblocked.
void reset_signal_actions(ChildSession session) {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) != 0) continue;
    const bool stays_ignored =
        session == ChildSession::inherited || signal == SIGHUP;
    if (action.sa_handler == SIG_IGN && stays_ignored) continue;
    action.sa_flags = 0;
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
}

// Runs in the child, on a stack of its own but in the parent's memory, while
// the parent's thread is suspended. So it makes only system calls: nothing here
// may allocate or lock. Descriptors and signal actions are already the child's
// own.
int execute(void* argument) {
  auto& plan = *static_cast<ChildPlan*>(argument);
  const auto fail = [&plan] {
    const int error = errno;
    [[maybe_unused]] auto written =
        write(plan.error_pipe, &error, sizeof(error));
    return kFailedToExecute;
  };
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return fail();
  // If the parent died before the line above, nothing would ever kill this
  // process.
  if (getppid() != plan.parent) return 128 + SIGKILL;
  if (plan.session == ChildSession::own && setsid() < 0) return fail();
  reset_signal_actions(plan.session);

  for (int target = 0; target < 3; ++target) {
    const int source = plan.standard_fds[static_cast<size_t>(target)];
    if (source != target && dup2(source, target) < 0) return fail();
  }
  // A kernel before 5.11 refuses this flag; descriptors that are not
  // close-on-exec then stay open, as over any exec.
  syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 1U << 2);  // CLOEXEC
  for (const int fd : *plan.inherited_fds) {
    if (fd >= 0 && fcntl(fd, F_SETFD, 0) != 0) return fail();
  }
  if (!plan.cpus->empty() && syscall(SYS_sched_setaffinity, 0,
                                     plan.cpus->size() * sizeof(unsigned long),
                                     plan.cpus->data()) != 0) {
    return fail();
  }
  const auto& descriptors = plan.surroundings->descriptors;
  if (descriptors) setrlimit(RLIMIT_NOFILE, &*descriptors);
  sigprocmask(SIG_SETMASK, &plan.surroundings->signal_mask, nullptr);
  execve(plan.path, plan.arguments, plan.environment);
  return fail();
}

}  // namespace

ChildProcess ChildProcess::start(const ChildStart& start) {
  const std::vector<char*> arguments = exec_pointers(start.arguments);
  const std::vector<char*> environment = exec_pointers(start.environment);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw_errno(start.what);
  const FileDescriptor errors(ends[0]);
  const FileDescriptor error_pipe =
      above_standard_streams(FileDescriptor(ends[1]));
  const std::vector<unsigned long> cpus = affinity_mask(start.cpus);
  ChildPlan plan{start.path.c_str(),
                 arguments.data(),
                 environment.data(),
                 {start.stdin_fd, start.stdout_fd, start.stderr_fd},
                 &start.inherited_fds,
                 start.session,
                 &cpus,
                 &start.surroundings,
                 getpid(),
                 error_pipe.get()};
  std::vector<std::byte> stack(kStackBytes);
  int pidfd = -1;
  pid_t pid = -1;
  int clone_error = 0;
  {
    // So no handler runs in the child while it shares this memory.
    const BlockedSignals blocked;
    // CLONE_VFORK suspends this thread until the child has executed or ended.
    // posix_spawn() could not ask for a signal at the parent's death.
    const auto clone_with = [&](int pidfd_flag) {
      return ::clone(&execute, stack.data() + stack.size(),
                     kMemory | CLONE_VFORK | pidfd_flag | SIGCHLD, &plan,
                     &pidfd);
    };
    pid = clone_with(CLONE_PIDFD);
    // Sandboxes may refuse the flag.
    if (pid < 0 && (errno == EINVAL || errno == EPERM)) pid = clone_with(0);
    clone_error = errno;
  }
  if (pid < 0) {
    throw std::system_error(clone_error, std::generic_category(), start.what);
  }
  ChildProcess child(pid, FileDescriptor(pidfd),
                     start.session == ChildSession::own);
  // The child has executed or ended by now: an error that is not in the pipe
  // yet will not come.
  int error = 0;
  if (::read(errors.get(), &error, sizeof(error)) == sizeof(error)) {
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    child.note_end(status);
    throw ExecError(error, std::generic_category(), start.what);
  }
  return child;
}

ChildProcess ChildProcess::fork(const std::string& what,
                                const std::function<int()>& body) {
  std::fflush(nullptr);  // or the child would write buffered output again
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno(what);
  if (pid == 0) {
    const int exit_code = body();
    std::fflush(nullptr);
    _exit(exit_code);
  }
  return {pid,
          FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))),
          false};
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(other.pid_),
      pidfd_(std::move(other.pidfd_)),
      leads_group_(other.leads_group_),
      ended_(std::exchange(other.ended_, true)),
      started_(other.started_),
      ended_steadily_(other.ended_steadily_),
      ended_at_(other.ended_at_),
      wait_status_(other.wait_status_) {}

ChildProcess::~ChildProcess() {
  if (leads_group_) {
    signal_group(SIGKILL);
  } else {
    signal(SIGKILL);
  }
}

void ChildProcess::signal(int signal) const {
  if (ended_) return;
  // If other code has reaped the child, this fails with ESRCH, as it should:
  // another process may have the number by now. Other errors say that the
  // kernel, or the sandbox, has no such call.
  if (pidfd_ &&
      (syscall(SYS_pidfd_send_signal, pidfd_.get(), signal, 0, 0) == 0 ||
       errno == ESRCH)) {
    return;
  }
  ::kill(pid_, signal);
}

void ChildProcess::signal_main_thread(int signal) const {
  if (!ended_) ::syscall(SYS_tgkill, pid_, pid_, signal);
}

void ChildProcess::signal_group(int signal) const {
  if (!ended_) ::kill(-pid_, signal);
}

bool ChildProcess::reap() {
  if (ended_) return true;
  siginfo_t info{};
  constexpr int kOptions = WEXITED | WNOHANG;
  int result = -1;
  if (pidfd_) {
    result =
        ::waitid(kByPidfd, static_cast<id_t>(pidfd_.get()), &info, kOptions);
  }
  // Kernels before 5.4, and sandboxes, know no P_PIDFD.
  if (!pidfd_ || (result != 0 && errno != ECHILD && errno != EINTR)) {
    result = ::waitid(P_PID, static_cast<id_t>(pid_), &info, kOptions);
  }
  if (result != 0 && errno == EINTR) return false;
  if (result == 0 && info.si_pid == 0) return false;  // it still runs
  if (result == 0) {
    // The rest of this layer reads the form of waitpid().
    note_end(info.si_code == CLD_EXITED ? W_EXITCODE(info.si_status, 0)
                                        : W_EXITCODE(0, info.si_status));
  } else {
    // The process is no longer our child: other code has reaped it.
    note_end(std::nullopt);
  }
  return true;
}

void ChildProcess::set_ended(int wait_status) { note_end(wait_status); }

void ChildProcess::note_end(std::optional<int> wait_status) {
  ended_ = true;
  wait_status_ = wait_status;
  ended_steadily_ = Clock::now();
  ended_at_ = std::chrono::system_clock::now();
  pidfd_.reset();
}

int ChildProcess::exit_code() const { return exit_code_of(*wait_status_); }

std::optional<int> ChildProcess::ending_signal() const {
  if (!WIFSIGNALED(*wait_status_)) return std::nullopt;
  return WTERMSIG(*wait_status_);
}

std::chrono::milliseconds ChildProcess::lifetime() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(ended_steadily_ -
                                                               started_);
}

std::vector<unsigned long> affinity_mask(const std::set<int>& cpus) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> words;
  for (const int cpu : cpus) {
    const auto bit = static_cast<size_t>(cpu);
    words.resize(std::max(words.size(), bit / kBits + 1));
    words[bit / kBits] |= 1UL << (bit % kBits);
  }
  return words;
}

FileDescriptor above_standard_streams(FileDescriptor fd) {
  if (fd.get() > STDERR_FILENO) return fd;
  FileDescriptor copy(::fcntl(fd.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!copy) throw_errno("duplicating a descriptor for a child process");
  return copy;
}

}  // namespace lockstep::internal
