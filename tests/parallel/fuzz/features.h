#pragma once

#include <set>
#include <string>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::fuzz {

// What is special about a case, by name: failures are counted by these, and the
// draw refuses combinations by them.
std::set<std::string> features_of(const Case& fuzz_case);

}  // namespace lockstep::fuzz
