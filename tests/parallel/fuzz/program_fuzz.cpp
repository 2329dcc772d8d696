// Fuzzes programs over wrappers (README.md).
//
//   program_fuzz --world 2 --backend lockstep --seeds 0:1000
//
// fuzz_main.h lists the arguments.

#include "tests/parallel/fuzz/fuzz_main.h"
#include "tests/parallel/fuzz/programs/program_run.h"

int main(int argc, char** argv) {
  using namespace lockstep::internal::fuzz;
  return fuzz_main(subject_of(kPrograms), "program_fuzz", argc, argv);
}
