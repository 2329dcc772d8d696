#pragma once

#include "lockstep/cli/bench/options.h"
#include "lockstep/cli/stop_signal.h"

namespace lockstep::internal::bench {

// Runs the whole benchmark: prints the table, writes the JSON. Returns false if
// an element of a result was wrong (each such measurement is named on stderr).
// Throws std::invalid_argument for what the user can correct, WorldError,
// Interrupted. No process is left, whatever is thrown.
bool run(const Options& options, const StopSignal& stop);

}  // namespace lockstep::internal::bench
