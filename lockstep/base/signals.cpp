#include "lockstep/base/signals.h"

#include <string.h>

#include <stdexcept>
#include <string>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

const std::set<int> kNotForwarded{SIGKILL, SIGSTOP, SIGCHLD, SIGPIPE,
                                  SIGSEGV, SIGBUS,  SIGFPE,  SIGILL,
                                  SIGTRAP, SIGABRT, SIGSYS};

// Returns 0 if there is no such signal.
int signal_with_name(std::string_view name) {
  for (int signal = 1; signal < 32; ++signal) {
    const char* const known = ::sigabbrev_np(signal);
    if (known != nullptr && name == std::string("SIG") + known &&
        !kNotForwarded.contains(signal)) {
      return signal;
    }
  }
  return 0;
}

}  // namespace

std::set<int> parse_signals(std::string_view option, std::string_view text) {
  std::set<int> signals;
  std::string_view rest = text;
  while (true) {
    const size_t comma = rest.find(',');
    std::string_view name = rest.substr(0, comma);
    while (name.starts_with(' ')) name.remove_prefix(1);
    while (name.ends_with(' ')) name.remove_suffix(1);
    const int signal = signal_with_name(name);
    if (signal == 0) {
      throw std::invalid_argument(
          std::string(option) + " is \"" + std::string(text) +
          "\"; allowed are names of signals that a program may handle, "
          "separated by commas: SIGTERM,SIGINT,SIGUSR1");
    }
    signals.insert(signal);
    if (comma == std::string_view::npos) return signals;
    rest.remove_prefix(comma + 1);
  }
}

std::set<int> ending_signals() {
  constexpr const char* kName = "TORCHELASTIC_SIGNALS_TO_HANDLE";
  const auto names = get_env(kName);
  return names ? parse_signals(std::string("environment variable ") + kName,
                               *names)
               : kEndingSignals;
}

}  // namespace lockstep::internal
