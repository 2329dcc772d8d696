#include "lockstep/worker/stop_signals.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>

namespace lockstep::internal {
namespace {

struct Caught {
  std::atomic<bool> has_come{false};
  int objects = 0;
};
std::array<Caught, NSIG> all_caught;
static_assert(std::atomic<bool>::is_always_lock_free);

// The process that made the last object.
std::atomic<pid_t> catching{0};

void on_signal(int signal) {
  if (catching.load(std::memory_order_relaxed) == ::getpid()) {
    return StopSignals::notice(signal);
  }
  const int error = errno;
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // comes when this handler returns
  errno = error;
}

bool is_fault(int signal) {
  constexpr std::array kFaults{SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
  return std::ranges::find(kFaults, signal) != kFaults.end();
}

struct sigaction action_of(int signal) {
  struct sigaction action {};
  if (signal <= 0 || signal >= NSIG || signal == SIGKILL || signal == SIGSTOP ||
      is_fault(signal) || ::sigaction(signal, nullptr, &action) != 0) {
    throw std::invalid_argument(
        "SnapshotSaverOptions::stop_signals has " + std::to_string(signal) +
        "; give signals with which a job is told to stop, such as SIGTERM");
  }
  return action;
}

bool is_handled_by(const struct sigaction& action, sighandler_t handler) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == handler;
}

}  // namespace

StopSignals::StopSignals(std::vector<int> signals)
    : signals_(std::move(signals)) {
  for (const int signal : signals_) (void)action_of(signal);
  catching = ::getpid();
  struct sigaction ours {};
  ours.sa_handler = on_signal;
  ::sigemptyset(&ours.sa_mask);
  for (const int signal : signals_) {
    const struct sigaction current = action_of(signal);
    const bool is_typed = signal == SIGINT || signal == SIGQUIT;
    ours.sa_flags = SA_RESTART;
    if (is_typed) ours.sa_flags |= static_cast<int>(SA_RESETHAND);
    if (is_handled_by(current, SIG_DFL)) {
      ::sigaction(signal, &ours, nullptr);
    } else if (!is_handled_by(current, on_signal)) {
      continue;
    }
    ++all_caught[static_cast<size_t>(signal)].objects;
    caught_.push_back(signal);
  }
}

StopSignals::~StopSignals() {
  for (const int signal : caught_) {
    if (--all_caught[static_cast<size_t>(signal)].objects > 0) continue;
    // The program may have set another handler since.
    if (is_handled_by(action_of(signal), on_signal)) ::signal(signal, SIG_DFL);
  }
}

int StopSignals::highest() const {
  int highest = 0;
  for (const int signal : signals_) {
    if (all_caught[static_cast<size_t>(signal)].has_come) {
      highest = std::max(highest, signal);
    }
  }
  return highest;
}

void StopSignals::notice(int signal) noexcept {
  all_caught[static_cast<size_t>(signal)].has_come = true;
}

}  // namespace lockstep::internal
