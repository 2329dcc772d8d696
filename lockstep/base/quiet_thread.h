#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace lockstep::internal {

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
