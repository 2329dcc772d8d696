#pragma once

#include <cstdint>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::internal::fuzz {

// Returns the case of a seed, which depends only on the seed and the world
// size. Most cases combine two or three special features, and each feature is
// in at least one of fifty.
Case draw_case(uint64_t seed, int world_size);

}  // namespace lockstep::internal::fuzz
