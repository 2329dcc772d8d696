#pragma once

#include "lockstep/cli/bench/options.h"
#include "lockstep/cli/bench/stop_signal.h"

namespace lockstep::bench {

// Measures the thresholds of shared memory (shm::Tuning), with the protocol
// alone, for each number of ranks in options.ranks; if there are none, for 2,
// 4, 8, ... up to the number of cores, and for once, twice and four times that
// number. Prints the table, and writes the file that the library reads. Takes
// about options.seconds, and the time to start ranks. Throws what run() throws.
void tune(const Options& options, const StopSignal& stop);

}  // namespace lockstep::bench
