#include "lockstep/launch/spawn_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <system_error>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/exec_pointers.h"

namespace lockstep {
namespace {

constexpr const char* kThisProgram = "/proc/self/exe";
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
  char* const* arguments;
  char* const* environment;
  int stdin_fd;
  int inherited_fds[2];
  const sigset_t* signal_mask;
  pid_t parent;
  int error_pipe;  // takes errno if the child cannot execute
};

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
  if (getppid() != plan.parent) return kFailedToExecute;

  // Removes signal handlers: they would run in the parent's memory once signals
  // are unblocked. Ignored signals stay ignored, as over any exec.
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) != 0) continue;
    if (action.sa_handler == SIG_IGN || action.sa_handler == SIG_DFL) continue;
    action.sa_flags = 0;
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
  if (dup2(plan.stdin_fd, STDIN_FILENO) < 0) return fail();
  // A kernel before 5.11 refuses this flag; descriptors that are not
  // close-on-exec then stay open, as over any exec.
  syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 1U << 2);  // CLOEXEC
  for (const int fd : plan.inherited_fds) {
    if (fd >= 0 && fcntl(fd, F_SETFD, 0) != 0) return fail();
  }
  sigprocmask(SIG_SETMASK, plan.signal_mask, nullptr);
  execve(kThisProgram, plan.arguments, plan.environment);
  return fail();
}

std::string path_of_this_program() {
  char path[PATH_MAX];
  const ssize_t size = readlink(kThisProgram, path, sizeof(path));
  return size < 0 ? kThisProgram : std::string(path, static_cast<size_t>(size));
}

}  // namespace

SpawnProcess SpawnProcess::start(const SpawnStart& start, SpawnReport report) {
  const std::vector<char*> arguments = exec_pointers(start.arguments);
  const std::vector<char*> environment = exec_pointers(start.environment);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw_errno("spawn: pipe2");
  const FileDescriptor errors(ends[0]);
  const FileDescriptor error_pipe =
      above_standard_streams(FileDescriptor(ends[1]));
  ChildPlan plan{arguments.data(),   environment.data(),
                 start.stdin_fd,     {report.fd(), start.master_listen_fd},
                 &start.signal_mask, getpid(),
                 error_pipe.get()};
  const std::string what = "spawn: executing this program (" +
                           path_of_this_program() + ") again as rank " +
                           std::to_string(start.rank);
  // CLONE_VFORK suspends this thread until the child has executed or ended.
  std::vector<std::byte> stack(kStackBytes);
  int pidfd = -1;
  const pid_t pid =
      ::clone(&execute, stack.data() + stack.size(),
              kMemory | CLONE_VFORK | CLONE_PIDFD | SIGCHLD, &plan, &pidfd);
  if (pid < 0) throw_errno(what);
  SpawnProcess process(start.rank, pid, FileDescriptor(pidfd),
                       std::move(report));
  // The child has executed or ended by now: an error that is not in the pipe
  // yet will not come.
  int error = 0;
  if (::read(errors.get(), &error, sizeof(error)) == sizeof(error)) {
    throw std::system_error(error, std::generic_category(), what);
  }
  return process;
}

SpawnProcess::~SpawnProcess() {
  if (ended()) return;
  signal(SIGKILL);
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  while (!reap() && !deadline.expired()) {
    pollfd entry{pidfd_.get(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(deadline.remaining().count()));
  }
}

void SpawnProcess::signal(int signal) const {
  // Fails only if the process has ended meanwhile.
  if (!ended()) syscall(SYS_pidfd_send_signal, pidfd_.get(), signal, 0, 0);
}

bool SpawnProcess::reap() {
  if (ended()) return true;
  siginfo_t info{};
  const int result = ::waitid(kByPidfd, static_cast<id_t>(pidfd_.get()), &info,
                              WEXITED | WNOHANG);
  if (result != 0 && errno == EINTR) return false;
  if (result == 0 && info.si_pid == 0) return false;  // it still runs
  if (result == 0) {
    // The rest of this layer reads the form of waitpid().
    wait_status_ = info.si_code == CLD_EXITED ? W_EXITCODE(info.si_status, 0)
                                              : W_EXITCODE(0, info.si_status);
  }
  // Otherwise the process is no longer our child: other code has reaped it.
  pidfd_.reset();
  return true;
}

}  // namespace lockstep
