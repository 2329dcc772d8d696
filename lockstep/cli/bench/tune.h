#pragma once

#include "lockstep/cli/bench/options.h"
#include "lockstep/cli/bench/stop_signal.h"

namespace lockstep::bench {

// Measures the shared memory's thresholds (shm::Tuning) for each number of
// ranks in options.ranks, or from 2 to the cores and twice and four times as
// many, with the protocol alone; prints the table, and writes the file that
// the library reads. Takes about options.seconds, and the time to start ranks.
// Throws as run() does.
void tune(const Options& options, const StopSignal& stop);

}  // namespace lockstep::bench
