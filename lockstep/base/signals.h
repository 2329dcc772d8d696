#pragma once

#include <signal.h>

#include <csignal>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

namespace lockstep::internal {

// The signals that end a job if --signals-to-handle does not say otherwise, as
// under torchrun.
inline const std::set<int> kEndingSignals{SIGTERM, SIGINT, SIGHUP, SIGQUIT};

// Parses names separated by commas: "SIGTERM,SIGUSR1". Throws
// std::invalid_argument that begins with `option` for an empty list, and for
// what is not the name of a signal that can be handled and that is meant for
// this: not SIGKILL and SIGSTOP, signals of faults, SIGCHLD or SIGPIPE.
std::set<int> parse_signals(std::string_view option, std::string_view text);

// Returns the signals with which the launcher ends the job of this process:
// those of TORCHELASTIC_SIGNALS_TO_HANDLE, or kEndingSignals if it is unset.
// Throws std::invalid_argument if the variable has another value.
std::set<int> ending_signals();

// Blocks every signal in this thread while it lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// Starts a thread that takes no signals, so that the program's handlers run in
// the program's own threads. Throws std::system_error.
template <typename... Call>
std::thread quiet_thread(Call&&... call) {
  const BlockedSignals blocked;
  return std::thread(std::forward<Call>(call)...);
}

}  // namespace lockstep::internal
