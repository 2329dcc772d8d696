// Fuzzes DistributedDataParallel with random autograd graphs (README.md).
//
//   ddp_fuzz --world 2 --backend lockstep --seeds 0:1000
//
// fuzz_main.h lists the arguments.

#include "tests/parallel/fuzz/ddp_subject.h"
#include "tests/parallel/fuzz/fuzz_main.h"

int main(int argc, char** argv) {
  using namespace lockstep::internal::fuzz;
  return fuzz_main(subject_of(kDdpCases), "ddp_fuzz", argc, argv);
}
