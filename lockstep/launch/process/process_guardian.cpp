#include "lockstep/launch/process/process_guardian.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/process/descendants.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kInterruptAllowance{15000};
// How often an agent that outlives SIGKILL is looked after.
constexpr milliseconds kAfterKill{100};

sigset_t forwarded_signals(const std::set<int>& ending_signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : ending_signals) sigaddset(&set, signal);
  for (const int signal : {SIGUSR1, SIGUSR2, SIGTSTP}) sigaddset(&set, signal);
  for (const int signal : {SIGHUP, SIGTSTP}) {
    struct sigaction found {};
    sigaction(signal, nullptr, &found);
    if (found.sa_handler == SIG_IGN) sigdelset(&set, signal);
  }
  return set;
}

void block_all_but_faults() {
  sigset_t set;
  sigfillset(&set);
  for (int fault :
       {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
    sigdelset(&set, fault);
  }
  sigprocmask(SIG_SETMASK, &set, nullptr);
}

int run_agent(const std::function<int(GuardianLink)>& body, GuardianLink link) {
  block_all_but_faults();
  setsid();
  // The name differs from the launcher's, so that after "killall -9 lockstep"
  // the agent is left to clean up.
  prctl(PR_SET_NAME, "elastic_agent");
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    link.surroundings.descriptors = limit;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  return body(std::move(link));
}

// The work of the launcher until the agent has ended.
class Guardian {
 public:
  Guardian(ChildProcess agent, milliseconds agent_allowance,
           const std::set<int>& ending_signals, FileDescriptor commands,
           FileDescriptor signals)
      : agent_(std::move(agent)),
        agent_allowance_(agent_allowance),
        ending_signals_(ending_signals),
        commands_(std::move(commands)),
        signals_(std::move(signals)) {}

  GuardedEnd watch() {
    while (!agent_.ended()) {
      pollfd entry{signals_.get(), POLLIN, 0};
      // One in uninterruptible sleep outlives SIGKILL, and so do its workers.
      const int timeout =
          kill_agent_at_
              ? static_cast<int>(
                    std::max(kill_agent_at_->remaining(), kAfterKill).count())
              : -1;
      poll(&entry, 1, timeout);
      if (kill_agent_at_ && kill_agent_at_->expired()) agent_.signal(SIGKILL);
      take_signals();
    }
    GuardedEnd end;
    end.exit_code = agent_.exit_code();
    end.killed_by = agent_.ending_signal().value_or(0);
    end.all_ended = end_descendants(milliseconds(0), [](pid_t, int) {});
    return end;
  }

 private:
  void take_signals() {
    signalfd_siginfo info{};
    while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD) {
        reap_children([this](pid_t pid, int status) {
          if (pid == agent_.pid()) agent_.set_ended(status);
        });
        // The agent may have been stopped.
        if (kill_agent_at_) agent_.signal(SIGCONT);
        continue;
      }
      tell_agent(signal);
      if (!ending_signals_.contains(signal)) {
        if (signal == SIGTSTP) suspend();
        continue;
      }
      if (!kill_agent_at_) kill_agent_at_ = Deadline::after(agent_allowance_);
      if (signal == SIGINT && ++interrupts_ == 2) {
        kill_agent_at_ = Deadline::after(kInterruptAllowance);
      }
      agent_.signal(SIGCONT);
    }
  }

  void tell_agent(int signal) {
    const char byte = static_cast<char>(signal);
    // An agent that no longer reads has ended, or watch() will kill it.
    [[maybe_unused]] auto written = write(commands_.get(), &byte, 1);
  }

  // Stops this process, as SIGTSTP does, until it is continued. By the signal's
  // own action, as that does not stop a process that no shell could continue.
  void suspend() {
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    raise(SIGTSTP);
    sigprocmask(SIG_UNBLOCK, &stop, nullptr);
    sigprocmask(SIG_BLOCK, &stop, nullptr);
    tell_agent(SIGCONT);
  }

  ChildProcess agent_;
  milliseconds agent_allowance_;
  const std::set<int>& ending_signals_;
  FileDescriptor commands_;
  FileDescriptor signals_;
  std::optional<Deadline> kill_agent_at_;
  int interrupts_ = 0;
};

}  // namespace

GuardedEnd run_guarded(const std::function<int(GuardianLink)>& body,
                       milliseconds agent_allowance,
                       const std::set<int>& ending_signals,
                       const std::function<void()>& agent_has_begun) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw_errno("guardian's pipe");
  FileDescriptor commands(ends[0]);
  FileDescriptor forward(ends[1]);

  // If SIGCHLD is ignored, which exec passes on, the kernel reaps children
  // before this process can see how they ended.
  struct sigaction by_default {};
  by_default.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &by_default, nullptr);

  sigset_t taken = forwarded_signals(ending_signals);
  sigaddset(&taken, SIGCHLD);
  sigset_t blocked = taken;
  // With SIGPIPE blocked, a write to a dead agent or a closed stderr only
  // fails, and does not kill this process.
  sigaddset(&blocked, SIGPIPE);
  GuardianLink link;
  sigprocmask(SIG_BLOCK, &blocked, &link.surroundings.signal_mask);
  FileDescriptor signals(signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals) throw_errno("signalfd");
  adopt_orphans();

  ChildProcess agent = ChildProcess::fork("starting the launcher's agent", [&] {
    // If the agent held the writing end too, the stream would never end.
    forward.reset();
    signals.reset();
    link.commands = std::move(commands);
    return run_agent(body, std::move(link));
  });
  commands.reset();
  agent_has_begun();
  return Guardian(std::move(agent), agent_allowance, ending_signals,
                  std::move(forward), std::move(signals))
      .watch();
}

}  // namespace lockstep::internal
