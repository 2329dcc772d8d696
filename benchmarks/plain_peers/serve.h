#pragma once

#include "benchmarks/plain_peers/reducer.h"

namespace lockstep::internal::bench {

// Says on stdout that the world is ready, then answers each line of JSON on
// stdin, until stdin ends (docs/benchmarks.md, "Your own peer"). All
// ranks must call it; only rank 0 reads and writes, for all. It measures as
// lockstep/cli/bench/rank/main.cpp does. A request that cannot be done gets an
// answer that says why; throws if the reducer fails.
void serve(Reducer& reducer);

// Says on stdout why this program ends; `lockstep bench` repeats that.
void say_failure(const std::exception& error);

}  // namespace lockstep::internal::bench
