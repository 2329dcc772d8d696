#pragma once

#include <chrono>
#include <functional>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/worker_process.h"

namespace lockstep {

// What the agent holds of its guardian.
struct GuardianLink {
  // Bytes are signals to hand to the workers, in the order of their arrival;
  // the end of the stream is the guardian's death. Non-blocking.
  FileDescriptor commands{};
  // As they were before the launcher blocked signals and, in the agent, raised
  // the soft limit of descriptors to the hard one: each worker may need a few.
  Surroundings surroundings{};
};

// How the agent ended.
struct GuardedEnd {
  int exit_code = 0;      // what the body returned; 128 + signal if killed
  int killed_by = 0;      // the signal that killed the agent, or 0
  bool all_ended = true;  // false where a descendant outlived SIGKILL
};

// Splits the launcher into two processes, so that neither's death leaves an
// orphan:
//
//   launcher     the process that the user started and signals: the guardian
//     agent      its child, in a session of its own: runs `body`
//       workers  started by `body`, and whatever they start
//
// Both adopt orphans (descendants.h). When the launcher dies, the agent sees
// the end of the stream and ends all its descendants; when the agent dies, the
// kernel kills the workers (PR_SET_PDEATHSIG), what they had started falls to
// the launcher, and the launcher ends it. Only both killed in the same instant
// can leave a process that a worker had started; the workers themselves die
// even then.
//
// The launcher takes SIGINT, SIGTERM, SIGQUIT, SIGHUP (unless it is ignored:
// nohup), SIGUSR1 and SIGUSR2 and passes each on as one byte. The agent blocks
// all signals that can be blocked, so that a scheduler that signals every
// process of a job does not count twice.
//
// A signal that ends the job must not wait for an agent that is stopped
// (SIGSTOP): the launcher continues it, however often it is stopped again, and
// kills it when it has not ended `agent_allowance` after the first such signal,
// or 15 s after a second SIGINT. That holds while the launcher itself runs; one
// that is stopped takes its signal when it is continued.
//
// `body` must not throw; the child ends with its result, without running the
// caller's destructors. Call it with one thread, and at the end of a program:
// signals stay blocked after it. Blocks until the agent has ended. Throws
// std::system_error where there is no process or pipe to be had.
GuardedEnd run_guarded(const std::function<int(GuardianLink)>& body,
                       std::chrono::milliseconds agent_allowance);

}  // namespace lockstep
