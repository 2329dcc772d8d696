#pragma once

#include "tests/parallel/fuzz/subject.h"

namespace lockstep::internal::fuzz {

// The main() of a fuzzer, which also serves as the ranks that it starts.
//
//   --world N          ranks; default 2
//   --backend NAME     default "lockstep"
//   --seeds BEGIN:END  or one seed
//   --case-timeout 20  seconds until the ranks of a case are killed
//   --reduce           makes each failing case as small as it still fails, and
//                      prints it as a program
//   --program          prints each failing case as it was drawn
//   --with TEXT, --without TEXT
//                      leaves out cases without a feature whose name contains
//                      TEXT, or with one; may be repeated
//   --statistics       counts failures by what the cases had in them
//
// Prints a line for each failing seed and one with the sums. Exits with 1 if a
// case failed, with 2 if the arguments are wrong.
//
// Prints a line for each failing seed and one with the sums. Returns 1 if a
// case failed, 2 if the arguments are wrong.
int fuzz_main(const Subject& subject, const char* name, int argc, char** argv);

}  // namespace lockstep::internal::fuzz
