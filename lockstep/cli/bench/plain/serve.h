#pragma once

#include "lockstep/cli/bench/plain/reducer.h"

namespace lockstep::bench {

// Tells on stdout that the world is ready, then answers each line of JSON on
// stdin, until stdin ends (docs/benchmarks.md, "Adding a peer"). All ranks call
// it; rank 0 alone reads and writes, for all. It measures as rank/main.cpp
// does. What cannot be done is answered; throws where the reducer fails.
void serve(Reducer& reducer);

// Says on stdout why this program ends, for `lockstep bench` to repeat.
void say_failure(const std::exception& error);

}  // namespace lockstep::bench
