#pragma once

#include <set>

#include "tests/parallel/fuzz/case.h"
#include "tests/parallel/fuzz/dice.h"
#include "tests/parallel/fuzz/traits.h"

namespace lockstep::internal::fuzz {

// Adds the events of three to five steps to a case that has its module and its
// options already.
void draw_events(Case& fuzz_case, const std::set<Trait>& traits, Dice& dice);

}  // namespace lockstep::internal::fuzz
