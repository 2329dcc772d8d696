#pragma once

#include "tests/parallel/fuzz/case.h"
#include "tests/parallel/fuzz/subject.h"

namespace lockstep::internal::fuzz {

// Runs a case on this rank of the default group and compares parameters and
// gradients with the reference after each backward pass and each step. A
// difference is reported but does not end the case, so the ranks stay in step.
// Collective.
Outcome run_on_rank(const Case& fuzz_case);

}  // namespace lockstep::internal::fuzz
