#include "lockstep/launch/local_agent.h"

#include <sys/signalfd.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "lockstep/launch/descendants.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

// For what a worker left behind, from SIGTERM to SIGKILL.
constexpr milliseconds kLeftoverGrace{200};
// How long a worker may outlive SIGKILL (uninterruptible in the kernel) until
// it is given up.
constexpr milliseconds kKillAllowance{5000};
// How long the console may take nothing once all workers have ended.
constexpr milliseconds kConsoleIdle{60'000};

bool stops_workers(int signal) {
  return signal != SIGUSR1 && signal != SIGUSR2;
}

std::string count_workers(size_t count) {
  return std::to_string(count) + (count == 1 ? " worker" : " workers");
}

std::string seconds(milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s",
                static_cast<double>(time.count()) / 1000);
  return text;
}

FileDescriptor open_child_events() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  FileDescriptor fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw_errno("signalfd of SIGCHLD");
  return fd;
}

void discard_events(int fd) {
  signalfd_siginfo info{};
  while (read(fd, &info, sizeof(info)) > 0) {
  }
}

}  // namespace

LocalAgent::LocalAgent(LocalAgentOptions options, const RunDirectory& directory,
                       StorePort first_port, GuardianLink link, Report report)
    : options_(std::move(options)),
      directory_(directory),
      port_(std::move(first_port)),
      link_(std::move(link)),
      report_(std::move(report)),
      child_events_(open_child_events()) {
  adopt_orphans();
}

int LocalAgent::run() {
  const int max_restarts = options_.workers.max_restarts;
  for (int restarts = 0;; ++restarts) {
    if (!port_) {
      port_ = StorePort::hold(options_.master_addr, options_.master_port);
    }
    const auto failure = run_round(restarts, *port_);
    // Closed before the next is opened, which may have to be the same.
    port_.reset();
    if (guardian_gone_) return 128 + SIGKILL;

    const bool final = restarts == max_restarts || ending_signal_ != 0;
    if (failure) {
      std::string text = describe(*failure, restarts, max_restarts);
      if (!final) {
        text += "\n  restarting all " +
                count_workers(
                    static_cast<size_t>(options_.workers.nproc_per_node)) +
                ": restart " + std::to_string(restarts + 1) + " of " +
                std::to_string(max_restarts);
      }
      report_(text);
    }
    if (ending_signal_ != 0) return 128 + ending_signal_;
    if (!failure) return 0;
    if (final) return failure->exit_code;
  }
}

std::optional<WorkerFailure> LocalAgent::run_round(int restart_count,
                                                   const StorePort& port) {
  std::optional<WorkerGroup> group;
  try {
    group.emplace(options_.workers, restart_count, port, directory_,
                  link_.original_mask, mux_);
  } catch (...) {
    end_descendants(milliseconds(0), [](pid_t, int) {});
    throw;
  }
  Stop stop;
  while (group->running() > 0 && !stop.given_up) {
    wait_for_event(*group, stop);
    reap_children(
        [&](pid_t pid, int status) { group->set_ended(pid, status); });
    if (group->failed() && !stop.kill_at) {
      group->settle();
      stop.kill_at = Deadline::after(options_.failure_shutdown_timeout);
      group->signal_process_groups(SIGTERM);
    }
    serve_guardian(*group, stop);
    enforce_deadline(*group, stop);
  }
  end_leftovers(*group);
  // A failure that a forwarded signal brought about is the signal's doing.
  return stop.signal != 0 ? std::nullopt : group->first_failure();
}

void LocalAgent::wait_for_event(WorkerGroup& group, const Stop& stop) {
  entries_.clear();
  entries_.push_back({child_events_.get(), POLLIN, 0});
  if (!guardian_gone_) {
    entries_.push_back({link_.commands.get(), POLLIN, 0});
  }
  mux_.add_poll_entries(entries_);
  const int timeout = stop.kill_at && group.running() > 0
                          ? static_cast<int>(stop.kill_at->remaining().count())
                          : -1;
  if (poll(entries_.data(), entries_.size(), timeout) <= 0) return;
  discard_events(child_events_.get());
  mux_.handle_poll_entries(entries_);
}

void LocalAgent::serve_guardian(WorkerGroup& group, Stop& stop) {
  while (!guardian_gone_) {
    char signal = 0;
    const ssize_t count = read(link_.commands.get(), &signal, 1);
    if (count == 1) {
      forward(group, stop, signal);
    } else if (count == 0) {
      // The launcher was killed: no time for anything.
      guardian_gone_ = true;
      kill_now(stop);
    } else if (errno != EINTR) {
      return;  // nothing more to read
    }
  }
}

void LocalAgent::forward(WorkerGroup& group, Stop& stop, int signal) {
  if (!stops_workers(signal)) {
    group.signal_process_groups(signal);
    return;
  }
  if (ending_signal_ == 0) {
    ending_signal_ = signal;
    if (stop.kill_at) return;  // they are being stopped, and faster
    group.settle();
    stop.signal = signal;
    stop.kill_at = Deadline::after(options_.shutdown_timeout);
    group.signal_process_groups(signal);
    report_(signal_name(signal) + " forwarded to " +
            count_workers(group.running()) + ", which may take " +
            seconds(options_.shutdown_timeout) + " to end" +
            (signal == SIGINT ? "; once more kills at once" : ""));
  } else if (signal == SIGINT) {
    kill_now(stop);
  }
}

void LocalAgent::kill_now(Stop& stop) {
  if (!stop.killed) stop.kill_at = Deadline::after(milliseconds(0));
}

void LocalAgent::enforce_deadline(WorkerGroup& group, Stop& stop) {
  if (!stop.kill_at || !stop.kill_at->expired() || group.running() == 0) return;
  if (!stop.killed) {
    stop.killed = true;
    stop.kill_at = Deadline::after(kKillAllowance);
    group.kill_workers();
  } else {
    stop.given_up = true;
  }
}

void LocalAgent::end_leftovers(WorkerGroup& group) {
  const bool all_ended = end_descendants(
      kLeftoverGrace,
      [&](pid_t pid, int status) { group.set_ended(pid, status); });
  const int interrupt = guardian_gone_ ? -1 : link_.commands.get();
  mux_.drain(guardian_gone_ ? milliseconds(0) : kConsoleIdle, interrupt);
  if (!all_ended) {
    report_(
        "a process outlived SIGKILL, uninterruptible in the kernel; it is "
        "left behind");
  }
}

}  // namespace lockstep
