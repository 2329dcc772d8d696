#pragma once

#include <set>
#include <string>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::internal::fuzz {

// Returns the names of the special features of a case. Failures are counted by
// these names, and the draw refuses combinations by them.
std::set<std::string> features_of(const Case& fuzz_case);

}  // namespace lockstep::internal::fuzz
