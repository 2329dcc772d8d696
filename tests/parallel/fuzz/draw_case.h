#pragma once

#include <cstdint>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::fuzz {

// The case of a seed: depends on nothing else but the world size. Most cases
// combine two or three special features, and each feature comes in one of fifty
// at least.
Case draw_case(uint64_t seed, int world_size);

}  // namespace lockstep::fuzz
