#pragma once

#include <csignal>

namespace lockstep::internal {

// Blocks every signal in this thread while it lives. A thread that is started
// meanwhile has all signals blocked, so that the program's signals are handled
// in the program's own threads.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  // Returns the signals that were blocked before.
  const sigset_t& before() const { return before_; }

 private:
  sigset_t before_;
};

}  // namespace lockstep::internal
