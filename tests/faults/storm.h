#pragma once

#include <cstdint>

namespace lockstep::testing {

struct Storm {
  uint32_t seed;  // the same on all ranks
  int turns;
  // Whether sums have the bits of adding rank 0's, 1's, 2's ... one after the
  // other; if not, what is summed is whole numbers, whose order is no matter.
  bool in_rank_order;
};

// Operations of the default group of mixed kinds, dtypes and sizes back to
// back, some asynchronous, each rank with delays of its own. Every result is
// compared bit by bit; throws std::runtime_error with the turn that is wrong.
void run_storm(const Storm& storm);

}  // namespace lockstep::testing
