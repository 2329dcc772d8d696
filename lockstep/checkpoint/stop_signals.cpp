#include "lockstep/checkpoint/stop_signals.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace lockstep::internal {
namespace {

std::atomic<bool> signal_has_come{false};
std::atomic<int> objects{0};
static_assert(std::atomic<bool>::is_always_lock_free);

void on_signal(int) { signal_has_come = true; }

}  // namespace

StopSignals::StopSignals(const std::vector<int>& signals) {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  for (const int signal : signals) {
    struct sigaction current {};
    if (signal == SIGKILL || signal == SIGSTOP ||
        ::sigaction(signal, nullptr, &current) != 0) {
      throw std::invalid_argument(
          "SnapshotSaverOptions::stop_signals has " + std::to_string(signal) +
          "; give signals that a program can handle, such as SIGTERM");
    }
  }
  if (objects++ == 0) signal_has_come = false;
  for (const int signal : signals) {
    struct sigaction current {};
    ::sigaction(signal, nullptr, &current);
    if ((current.sa_flags & SA_SIGINFO) != 0 || current.sa_handler != SIG_DFL) {
      continue;
    }
    ::sigaction(signal, &action, nullptr);
    caught_.push_back(signal);
  }
}

StopSignals::~StopSignals() {
  for (const int signal : caught_) {
    struct sigaction current {};
    ::sigaction(signal, nullptr, &current);
    // The program may have set another handler since.
    if ((current.sa_flags & SA_SIGINFO) == 0 &&
        current.sa_handler == on_signal) {
      ::signal(signal, SIG_DFL);
    }
  }
  --objects;
}

bool StopSignals::have_come() { return signal_has_come; }

}  // namespace lockstep::internal
