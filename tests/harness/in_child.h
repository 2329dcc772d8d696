#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace lockstep::internal::testing {

// Runs `action` in a fork of this process, and returns what it returned; -1 if
// the child was ended in another way, such as by an exception.
template <class Action>
int in_child(const Action& action) {
  const pid_t child = ::fork();
  // An exception must not lead to the other tests.
  if (child == 0) [&]() noexcept { ::_exit(action()); }();
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace lockstep::internal::testing
