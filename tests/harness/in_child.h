#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace lockstep::internal::testing {

// Runs `action` in a fork of this process, and returns what it returned; -1 if
// the child was ended in another way.
template <class Action>
int in_child(const Action& action) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(action());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace lockstep::internal::testing
