#pragma once

#include <string>

namespace lockstep::internal {

// The exit codes of the commands if no worker decides them: for a mistake in
// what the user gave (as argparse, and so torchrun), and for a failure of the
// system.
inline constexpr int kUsageError = 2;
inline constexpr int kSystemError = 1;

// Returns a shell's exit code for a status from waitpid(): 128 + signal if a
// signal ended the process.
int exit_code_of(int wait_status);

// Returns "SIGTERM", or "signal 42" if the signal has no name.
std::string signal_name(int signal);

}  // namespace lockstep::internal
