#include "lockstep/cli/bench/competitors.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace lockstep::internal::bench {
namespace {

int compute(pid_t parent) {
  // The parent may have died before this thread asked to die with it.
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) return 1;
  std::atomic<unsigned> count = 0;
  while (true) count.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

Competitors::Competitors(int count) {
  const pid_t parent = getpid();
  for (int i = 0; i < count; ++i) {
    processes_.push_back(ChildProcess::fork(
        "starting a competing process", [parent] { return compute(parent); }));
  }
}

Competitors::~Competitors() {
  for (auto& process : processes_) process.signal(SIGKILL);
  for (auto& process : processes_) {
    while (!process.ended()) {
      int status = 0;
      if (waitpid(process.pid(), &status, 0) < 0 && errno == EINTR) continue;
      process.set_ended(status);
    }
  }
}

}  // namespace lockstep::internal::bench
