#pragma once

#include <vector>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::internal::fuzz {

// Returns all cases that are one edit smaller, in a fixed order: without an
// event, an operation or an option, or with fewer elements.
std::vector<Case> smaller_cases(const Case& fuzz_case);

}  // namespace lockstep::internal::fuzz
