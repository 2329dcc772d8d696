#pragma once

#include <chrono>
#include <functional>
#include <set>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/process/child_process.h"

namespace lockstep::internal {

// The values that the agent gets from its guardian.
struct GuardianLink {
  // Each byte is a signal to forward to the workers, in the order of arrival.
  // The end of the stream means that the guardian has died. Non-blocking.
  FileDescriptor commands{};
  // The state before the launcher blocked signals and, in the agent, raised the
  // soft limit of descriptors to the hard one, as the agent may need a few for
  // each worker.
  Surroundings surroundings{};
};

// How the agent ended.
struct GuardedEnd {
  int exit_code = 0;      // what the body returned; 128 + signal if killed
  int killed_by = 0;      // the signal that killed the agent, or 0
  bool all_ended = true;  // false if a descendant outlived SIGKILL
};

// Splits the launcher into two processes, so that neither's death leaves an
// orphan:
//
//   launcher     the process that the user started and signals: the guardian
//     agent      its child, in a session of its own: runs `body`
//       workers  started by `body`, and whatever they start
//
// Both adopt orphans (descendants.h). When the launcher dies, the agent sees
// the end of the stream and ends all its descendants. When the agent dies, the
// kernel kills the workers (PR_SET_PDEATHSIG); the launcher adopts what they
// had started, and ends it. Only if both are killed in the same instant can a
// process be left that a worker had started; the workers themselves die even
// then.
//
// The launcher takes `ending_signals` (SIGHUP unless it is ignored: nohup),
// SIGUSR1 and SIGUSR2 and passes each on as one byte. It passes SIGTSTP on, too
// (Ctrl-Z, unless it is ignored), stops as that signal stops a process, and
// passes SIGCONT on when it is continued; the agent runs on meanwhile. Other
// signals have their default action: they end the launcher, and so the job. The
// agent blocks all signals that can be blocked, so that a signal that a
// scheduler sends to every process of a job does not count twice.
//
// One of `ending_signals` must not wait for an agent that is stopped (SIGSTOP):
// the launcher continues the agent, however often it is stopped again, and
// kills it if it has not ended `agent_allowance` after the first such signal,
// or 15 s after a second SIGINT. This holds only while the launcher itself
// runs; a stopped launcher takes its signal when it is continued.
//
// `agent_has_begun` is called in the launcher's process once the agent has its
// copies of all descriptors, so that those that are the agent's alone can be
// closed there. `body` must not throw. The agent ends with the result of `body`
// as its exit code, without running the caller's destructors. Call this while
// the process has one thread, and at the end of a program: signals stay blocked
// afterwards. Blocks until the agent has ended. Throws std::system_error if no
// process or pipe is available.
GuardedEnd run_guarded(const std::function<int(GuardianLink)>& body,
                       std::chrono::milliseconds agent_allowance,
                       const std::set<int>& ending_signals,
                       const std::function<void()>& agent_has_begun);

}  // namespace lockstep::internal
