#pragma once

#include "tests/parallel/fuzz/draw_case.h"
#include "tests/parallel/fuzz/features.h"
#include "tests/parallel/fuzz/print_case.h"
#include "tests/parallel/fuzz/rank_run.h"
#include "tests/parallel/fuzz/reduce_case.h"
#include "tests/parallel/fuzz/subject.h"

namespace lockstep::internal::fuzz {

inline constexpr CaseKind<Case> kDdpCases{.draw = draw_case,
                                          .smaller = smaller_cases,
                                          .features = features_of,
                                          .program = program_of,
                                          .run = run_on_rank};

}  // namespace lockstep::internal::fuzz
