#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace lockstep::internal {

struct ThreadStack {
  pid_t thread = 0;
  std::string name{};                 // of the thread, as `ps -L` shows it
  std::vector<std::string> frames{};  // frame_line(), the innermost first
  std::string missing{};  // why there are no frames; empty if there are
};

// Returns the stacks of all threads of this process but the calling one, which
// runs no user's code. Each thread writes down its own stack in a handler of
// the signal stack_signal(); a thread that does not within 200 ms, because it
// blocks the signal or is stuck in the kernel, has no frames.
//
// A system call that the signal interrupts is restarted, or fails with EINTR,
// as signal(7) says. The handler is installed only during the call. If the
// program handles the signal itself, no thread has frames. Any thread; one at a
// time.
std::vector<ThreadStack> thread_stacks();

int stack_signal();  // SIGRTMAX - 4

// Returns the stacks as a JSON list of objects with "thread", "name", "frames"
// and "missing".
std::string to_json(const std::vector<ThreadStack>& stacks);

}  // namespace lockstep::internal
