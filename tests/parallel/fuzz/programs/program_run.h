#pragma once

#include "tests/parallel/fuzz/programs/program.h"
#include "tests/parallel/fuzz/subject.h"

namespace lockstep::internal::fuzz {

// Runs a program on this rank of the default group and compares what it
// computes with ProgramReference: after each backward that averages, and
// whenever parameters have changed. A difference is reported but does not end
// the program, so the ranks stay in step. Collective.
Outcome run_program(const Program& program);

inline constexpr CaseKind<Program> kPrograms{.draw = draw_program,
                                             .smaller = smaller_programs,
                                             .features = features_of_program,
                                             .program = text_of_program,
                                             .run = run_program};

}  // namespace lockstep::internal::fuzz
