// `lockstep bench`: starts ranks of ours and of peers, and times them in turns.
// The ranks are programs of their own (rank/, lockstep-bench-python.py); this
// one does not link LibTorch, so that it reports a mistyped option at once.

#include <signal.h>

#include <exception>
#include <stdexcept>

#include "lockstep/cli/bench/measure.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/stop_signal.h"
#include "lockstep/launch/process/exit_code.h"

int main(int argc, char** argv) {
  using namespace lockstep::internal::bench;
  using lockstep::internal::Interrupted, lockstep::internal::StopSignal;
  using lockstep::internal::kSystemError, lockstep::internal::kUsageError;
  try {
    const auto options = parse_options(argc, argv);
    if (!options) return 0;
    // A rank that has died is noticed by its exit, not by a write to it.
    signal(SIGPIPE, SIG_IGN);
    const StopSignal stop;
    if (run(*options, stop)) return 0;
    lockstep::internal::write_message(kName, "results were wrong; see above");
    return kSystemError;
  } catch (const Interrupted& interrupted) {
    return 128 + interrupted.signal();
  } catch (const std::invalid_argument& error) {
    lockstep::internal::write_message(kName, error.what());
    return kUsageError;
  } catch (const std::exception& error) {
    lockstep::internal::write_message(kName, error.what());
    return kSystemError;
  }
}
