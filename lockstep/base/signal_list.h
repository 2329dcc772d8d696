#pragma once

#include <csignal>
#include <set>
#include <string_view>

namespace lockstep::internal {

// The signals that end a job if --signals-to-handle does not say otherwise, as
// under torchrun.
inline const std::set<int> kEndingSignals{SIGTERM, SIGINT, SIGHUP, SIGQUIT};

// Parses names separated by commas: "SIGTERM,SIGUSR1". Throws
// std::invalid_argument that begins with `option` for an empty list, and for
// what is not the name of a signal that can be handled and that is meant for
// this: not SIGKILL and SIGSTOP, signals of faults, SIGCHLD or SIGPIPE.
std::set<int> parse_signals(std::string_view option, std::string_view text);

// Returns the signals with which the launcher ends the job of this process:
// those of TORCHELASTIC_SIGNALS_TO_HANDLE, or kEndingSignals if it is unset.
// Throws std::invalid_argument if the variable has another value.
std::set<int> ending_signals();

}  // namespace lockstep::internal
