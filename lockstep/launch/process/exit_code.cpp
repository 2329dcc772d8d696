#include "lockstep/launch/process/exit_code.h"

#include <string.h>
#include <sys/wait.h>

namespace lockstep::internal {

int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status)
                                  : WEXITSTATUS(wait_status);
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name
                         : "signal " + std::to_string(signal);
}

}  // namespace lockstep::internal
