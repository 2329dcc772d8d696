#pragma once

#include <cstdint>

namespace lockstep::internal::testing {

struct Storm {
  uint32_t seed;  // the same on all ranks
  int turns;
  // Whether sums must have the bits of adding rank 0's, 1's, 2's ... in that
  // order. If not, the summed numbers are integers, whose order does not
  // matter.
  bool in_rank_order;
};

// Runs operations of the default group of mixed kinds, dtypes and sizes back to
// back, some asynchronous, with random delays on each rank. Compares every
// result bit by bit; throws std::runtime_error that names the wrong turn.
void run_storm(const Storm& storm);

}  // namespace lockstep::internal::testing
