#include "lockstep/cli/stop_signal.h"

#include <sys/signalfd.h>
#include <unistd.h>

namespace lockstep::internal {

StopSignal::StopSignal() {
  sigset_t stops;
  sigemptyset(&stops);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    // An ignored signal stays ignored: nohup wants that, and a shell wants it
    // for what it runs in the background.
    if (sigaction(signal, nullptr, &action) == 0 &&
        action.sa_handler != SIG_IGN) {
      sigaddset(&stops, signal);
    }
  }
  sigprocmask(SIG_BLOCK, &stops, &original_);
  fd_ = FileDescriptor(signalfd(-1, &stops, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw_errno("signalfd");
}

void StopSignal::check() const {
  signalfd_siginfo info{};
  if (read(fd_.get(), &info, sizeof(info)) == sizeof(info)) {
    throw Interrupted(static_cast<int>(info.ssi_signo));
  }
}

}  // namespace lockstep::internal
