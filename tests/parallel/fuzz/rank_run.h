#pragma once

#include <string>

#include "tests/parallel/fuzz/case.h"

namespace lockstep::internal::fuzz {

enum class Verdict { passed, refused, failed };

struct Outcome {
  Verdict verdict{Verdict::passed};
  std::string reason;
  // Whether this rank took part in every operation of the case, so that the
  // next case can run in the same process group.
  bool is_in_step{true};
};

// Runs a case on this rank of the default group and compares parameters and
// gradients with the reference after each backward pass and each step. A
// difference is reported but does not end the case, so the ranks stay in step.
// Collective.
Outcome run_on_rank(const Case& fuzz_case);

}  // namespace lockstep::internal::fuzz
