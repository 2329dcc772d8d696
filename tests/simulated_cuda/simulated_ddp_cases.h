#pragma once

#include "lockstep/comm/init.h"
#include "tests/parallel/fuzz/ddp_subject.h"
#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal::fuzz {

inline Outcome run_with_delays(const Case& fuzz_case) {
  simulated_cuda::restart(fuzz_case.seed *
                              static_cast<uint64_t>(fuzz_case.world_size) +
                          static_cast<uint64_t>(get_rank()) + 1);
  return run_on_rank(fuzz_case);
}

// The cases of the fuzzer of graphs, each with its own delays.
inline constexpr CaseKind<Case> kSimulatedDdpCases{
    .draw = kDdpCases.draw,
    .smaller = kDdpCases.smaller,
    .features = kDdpCases.features,
    .program = kDdpCases.program,
    .run = run_with_delays};

}  // namespace lockstep::internal::fuzz
