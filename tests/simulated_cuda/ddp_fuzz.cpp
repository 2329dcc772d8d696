// ddp_fuzz on the simulated device (fuzz_main.h).

#include "tests/parallel/fuzz/fuzz_main.h"
#include "tests/simulated_cuda/simulated_ddp_cases.h"

int main(int argc, char** argv) {
  using namespace lockstep::internal::fuzz;  // NOLINT
  return fuzz_main(subject_of(kSimulatedDdpCases), "simgpu_ddp_fuzz", argc,
                   argv);
}
